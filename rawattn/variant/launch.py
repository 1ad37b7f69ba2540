"""This module says whether a kernel may begin before the launch in front of it has ended."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option


@dataclasses.dataclass(frozen=True)
class Dependent(Option):
    """It may, and waits for that launch's results: programmatic dependent launch, from Hopper on."""

    type: ClassVar[str] = "Dependent"
    source: ClassVar[str] = "variant/launch/dependent.cuh"


@dataclasses.dataclass(frozen=True)
class Independent(Option):
    """It may not."""

    type: ClassVar[str] = "Independent"
    source: ClassVar[str] = "variant/launch/independent.cuh"
