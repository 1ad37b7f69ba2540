"""This module says what comes of a score's arrays before it is asked for."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Field, Fields, TensorMap
from ..trace.pair_axes import PairAxes
from . import Option


@dataclasses.dataclass(frozen=True)
class NothingAhead(Option):
    """A score reads its arrays when it needs them."""

    type: ClassVar[str] = "NothingAhead"
    source: ClassVar[str] = "variant/ahead/nothing.cuh"


@dataclasses.dataclass(frozen=True)
class ElementsAhead(Option):
    """Elements of ``bytes`` bytes, one for each pair of a query and a key, come to shared memory a tile ahead."""

    bytes: int
    type: ClassVar[str] = "ElementsAhead"
    source: ClassVar[str] = "variant/ahead/elements.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ahead_bytes": self.bytes}


@dataclasses.dataclass(frozen=True)
class PrefetchedElements(Option):
    """Elements of ``bytes`` bytes, one for each pair of a query and a key, come to L2 a tile ahead."""

    bytes: int
    type: ClassVar[str] = "PrefetchedElements"
    source: ClassVar[str] = "variant/ahead/prefetched.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ahead_bytes": self.bytes}


@dataclasses.dataclass(frozen=True)
class TransposedElements(Option):
    """Elements in the backward, of whose logits a row is a key: threads read them when they need them, or all before."""

    type: ClassVar[str] = "TransposedElements"
    source: ClassVar[str] = "variant/ahead/transposed.cuh"


@dataclasses.dataclass(frozen=True)
class ElementsInDs(Option):
    """The same of a captured array with this name and these axes, in boxes of ``box_rows`` rows that TMA brings."""

    operand: str
    axes: PairAxes
    box_rows: int
    type: ClassVar[str] = "ElementsInDs"
    source: ClassVar[str] = "variant/ahead/in_ds.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"elements_first_q": self.axes.first_q, "elements_first_kv": self.axes.first_kv}

    @property
    def fields(self) -> Fields:
        return (Field("elements", "TmaTensor", TensorMap(self.operand, self.box_rows, self.axes, "q")),)


def ahead_of(score: object) -> Option:
    """The option for a score. Elements of four bytes fill a warp's pieces of shared memory at a cost that loads of them have not
    (perf/notes/functions.md)."""
    found = getattr(score, "ahead_bytes", 0)
    if not found:
        return NothingAhead()
    return ElementsAhead(found) if found == 2 else PrefetchedElements(found)


def bytes_in_smem(score: object) -> int:
    """The bytes of each element that comes to shared memory, or 0."""
    found = ahead_of(score)
    return found.bytes if isinstance(found, ElementsAhead) else 0
