"""Results over different keys, which ``combine.cu`` folds."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields
from .store import StorePartial

MOST_ARRAYS = 16  # in a launch's arguments


@dataclasses.dataclass(frozen=True)
class ScratchParts(Option):
    """The results that ``StorePartial`` left of ``splits`` splits."""

    type: ClassVar[str] = "ScratchParts"
    source: ClassVar[str] = "variant/parts/scratch.cuh"

    @property
    def fields(self) -> Fields:
        return (*StorePartial().fields, Field("splits", "i32"))


@dataclasses.dataclass(frozen=True)
class Arrays(Option):
    """Up to 16 pairs of o and lse, each with strides of its own: ``parts`` holds them, ``part_count`` says how many."""

    type: ClassVar[str] = "Arrays"
    source: ClassVar[str] = "variant/parts/arrays.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("parts", "PartList"), Field("part_count", "i32"))


@dataclasses.dataclass(frozen=True)
class SumAndArrays(Arrays):
    """The same, of which the first is a sum in the format that is computed in."""

    type: ClassVar[str] = "SumAndArrays"
    source: ClassVar[str] = "variant/parts/sum_and_arrays.cuh"
