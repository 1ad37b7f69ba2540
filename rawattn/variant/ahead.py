"""This module has what is brought of a score's arrays before it is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from typing import Any, ClassVar

from ..array.tma import BOX_COLUMNS
from ..trace.pair_axes import PairAxes
from . import Option
from .field import Field, Fields, TensorMap


class NothingAhead(Option):
    """A score reads its arrays when it needs them."""

    source: ClassVar[str] = "variant/ahead/nothing.cuh"


@dataclasses.dataclass(frozen=True)
class ElementsAhead(Option):
    """Elements of ``bytes`` bytes, one for each pair of a query and a key, come to shared memory a tile ahead."""

    bytes: int
    source: ClassVar[str] = "variant/ahead/elements.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ahead_bytes": self.bytes}


@dataclasses.dataclass(frozen=True)
class PrefetchedElements(Option):
    """Elements of ``bytes`` bytes, one for each pair of a query and a key, come to L2 a tile ahead."""

    bytes: int
    source: ClassVar[str] = "variant/ahead/prefetched.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ahead_bytes": self.bytes}


class DiagonalsAhead(Option):
    """A warp leaves in shared memory a value for each distance of its tile: the part of a score that the distance decides."""

    source: ClassVar[str] = "variant/ahead/diagonals.cuh"


@dataclasses.dataclass(frozen=True)
class TilesAhead(Option):
    """Elements of ``bytes`` bytes of a captured array with this name and these axes come to shared memory with the tiles of keys,
    in boxes of ``box_rows`` rows that TMA brings."""

    bytes: int
    operand: str
    axes: PairAxes
    box_rows: int
    source: ClassVar[str] = "variant/ahead/tiles.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"ahead_bytes": self.bytes, "ahead_first_q": self.axes.first_q, "ahead_first_kv": self.axes.first_kv}

    @property
    def fields(self) -> Fields:
        return (Field("ahead", "TmaTensor", TensorMap(self.operand, self.box_rows, self.axes)),)


def ahead_of(score: object) -> Option:
    """The option for a score in a kernel that brings no tiles of elements. Elements of four bytes fill a warp's pieces of shared
    memory at a cost that loads of them have not (perf/notes/functions.md)."""
    bytes = getattr(score, "ahead_bytes", 0)
    if not bytes:
        return NothingAhead()
    return ElementsAhead(bytes) if bytes == 2 else PrefetchedElements(bytes)


def ahead_by_tiles(score: Any, tma_captured: Container[str], tile_q: int, tile_kv: int) -> Option:
    """The option for a score in a kernel whose rows are queries that follow each other, and whose tiles of keys TMA brings: so it
    does elements, if it can read their array and a tile has whole panels of 64 keys (perf/notes/functions.md)."""
    if getattr(score, "has_diagonals", False):
        return DiagonalsAhead()
    other = ahead_of(score)
    if not isinstance(other, ElementsAhead) or tile_kv % BOX_COLUMNS or len(score.pair_axes) != 1:
        return other
    ((array, axes),) = score.pair_axes.values()
    name = f"{score.role}_{array}"
    if name not in tma_captured:
        return other
    return TilesAhead(other.bytes, name, axes, tile_q)


def bytes_in_smem(ahead: Option, tile_q: int, tile_kv: int, stages: int) -> int:
    """The bytes of a block's elements in shared memory, at most."""
    if isinstance(ahead, DiagonalsAhead):
        return 4 * (tile_q // 16) * (tile_kv + 16)
    tiles = {ElementsAhead: 2, TilesAhead: stages}.get(type(ahead), 0)
    return tiles * tile_q * tile_kv * getattr(ahead, "bytes", 0)
