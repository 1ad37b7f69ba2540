"""This module says how the gradients of pairs become those of a captured array's elements, and what their sums are."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Fill
from .item import Item

TYPES = {
    "tiles": "OfTiles", "rows": "OfRows", "columns": "OfColumns", "pairs": "OfPairs", "diagonals": "Diagonals",
    "scattered": "Scattered",
}  # fmt: skip
EXACT_WORDS = {"fp32": 13, "fp64": 68}  # of 64 bits, of an exact sum: ExactSum::size


@dataclasses.dataclass(frozen=True)
class Gather(Option):
    """The way that ``trace.gradients.gathering`` names."""

    way: str

    @property
    def cuda_type(self) -> str:
        return TYPES[self.way]

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"variant/captured/{self.way}.cuh",)


@dataclasses.dataclass(frozen=True)
class SimtLayout(Option):
    """This says which pairs of a tile a thread has, of 16 x 16 threads."""

    type: ClassVar[str] = "SimtLayout"
    source: ClassVar[str] = "variant/captured/layout_simt.cuh"


@dataclasses.dataclass(frozen=True)
class MmaLayout(Option):
    """The same, where warps have sums by mma.sync."""

    type: ClassVar[str] = "MmaLayout"
    source: ClassVar[str] = "variant/captured/layout_mma.cuh"


@dataclasses.dataclass(frozen=True)
class ExactSums(Option):
    """Sums that are the same in whatever order numbers are added, in the memory that ``fill`` says."""

    fill: Fill
    type: ClassVar[str] = "ExactSums"
    source: ClassVar[str] = "variant/captured/sums_exact.cuh"

    @staticmethod
    def bytes(number: str) -> int:
        """Those of an element's sum."""
        return 8 * EXACT_WORDS[number]

    @property
    def fields(self) -> Fields:
        return (Field("sums", "u64*", self.fill),)


@dataclasses.dataclass(frozen=True)
class OrderedSums(ExactSums):
    """Sums to each of which one thread adds, in one order."""

    type: ClassVar[str] = "OrderedSums"
    source: ClassVar[str] = "variant/captured/sums_ordered.cuh"

    @staticmethod
    def bytes(number: str) -> int:
        return {"fp32": 4, "fp64": 8}[number]

    @property
    def fields(self) -> Fields:
        return (Field("sums", "Number*", self.fill),)


@dataclasses.dataclass(frozen=True)
class WrittenOnce(Option):
    """No sums: each element, of the format that ``item`` names, is one pair's alone, and is written where it stays."""

    fill: Fill
    item: str
    type: ClassVar[str] = "WrittenOnce"
    source: ClassVar[str] = "variant/captured/sums_written.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("sums", f"{Item(self.item).cuda_type}*", self.fill),)
