"""This module says what comes of a score's arrays before it is asked for."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

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
class DiagonalsAhead(Option):
    """What a score makes of a pair's distance alone comes to shared memory, once for each distance of a warp's tile."""

    type: ClassVar[str] = "DiagonalsAhead"
    source: ClassVar[str] = "variant/ahead/diagonals.cuh"


def ahead_of(score: object, rows_are_queries: bool = False) -> Option:
    """The option for a score; ``rows_are_queries``: rows of a tile that follow each other are queries that do. Elements of four
    bytes fill a warp's pieces of shared memory at a cost that loads of them have not (perf/notes/functions.md)."""
    if rows_are_queries and getattr(score, "has_diagonals", False):
        return DiagonalsAhead()
    found = getattr(score, "ahead_bytes", 0)
    if not found:
        return NothingAhead()
    return ElementsAhead(found) if found == 2 else PrefetchedElements(found)


def bytes_in_smem(score: object, tile_q: int, tile_kv: int) -> int:
    """The most bytes that come to shared memory for a tile."""
    found = ahead_of(score, rows_are_queries=True)
    if isinstance(found, DiagonalsAhead):
        return tile_q // 16 * (16 + tile_kv) * 4
    return 2 * tile_q * tile_kv * found.bytes if isinstance(found, ElementsAhead) else 0
