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
