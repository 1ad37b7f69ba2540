"""This module says how q becomes an operand of products."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper


@dataclasses.dataclass(frozen=True)
class PlainQ(Option):
    """It is one as it lies in memory."""

    type: ClassVar[str] = "PlainQ"
    source: ClassVar[str] = "variant/q_operand/plain.cuh"


@dataclasses.dataclass(frozen=True)
class ScaledQ(Wrapper):
    """In half precision, each row times a power of two, for products with keys of eight bits; the base is what these are
    multiplied by."""

    type: ClassVar[str] = "ScaledQ"
    source: ClassVar[str] = "variant/q_operand/scaled.cuh"
