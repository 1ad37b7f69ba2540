"""This module says how a warp's blocks of numbers are operands of mma.sync, and how they leave."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class Blocks16(Option):
    """Numbers of 16 bits."""

    type: ClassVar[str] = "Blocks16"
    source: ClassVar[str] = "variant/blocks/bits16.cuh"


@dataclasses.dataclass(frozen=True)
class Blocks32(Option):
    """Numbers of 32 bits."""

    type: ClassVar[str] = "Blocks32"
    source: ClassVar[str] = "variant/blocks/bits32.cuh"
