"""This module says how the gradients of pairs become those of a captured array's elements, and what their sums are."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .element import Item
from .field import Field, Fields, Fill

TYPES = {
    "tiles": "OfTiles", "rows": "OfRows", "columns": "OfColumns", "pairs": "OfPairs", "diagonals": "Diagonals",
    "scattered": "Scattered",
}  # fmt: skip
EXACT_WORDS = {"fp32": 13, "fp64": 68}  # of 64 bits, of an exact sum: ExactSum::size


@dataclasses.dataclass(frozen=True)
class Gather(Option):
    """This says how pairs are summed: what ``trace.gradients.gathering`` names."""

    name: str

    @property
    def cuda_type(self) -> str:
        return TYPES[self.name]

    @property
    def sources(self) -> tuple[str, ...]:
        return (f"variant/captured/{self.name}.cuh",)


class SimtLayout(Option):
    """Each of 16 x 16 threads has pairs of a tile."""

    source: ClassVar[str] = "variant/captured/layout_simt.cuh"


class MmaLayout(Option):
    """Warps have pairs of a tile as sums of mma.sync have them."""

    source: ClassVar[str] = "variant/captured/layout_mma.cuh"


@dataclasses.dataclass(frozen=True)
class ExactSums(Option):
    """Sums that are the same in whatever order numbers are added, in the memory that ``fill`` says."""

    fill: Fill
    source: ClassVar[str] = "variant/captured/sums_exact.cuh"

    @staticmethod
    def bytes(number: str) -> int:
        """The bytes of an element's sum."""
        return 8 * EXACT_WORDS[number]

    @property
    def fields(self) -> Fields:
        return (Field("sums", "u64*", self.fill),)


class OrderedSums(ExactSums):
    """Sums to each of which one thread adds, in one order."""

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
    source: ClassVar[str] = "variant/captured/sums_written.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("sums", f"{Item(self.item).cuda_type}*", self.fill),)
