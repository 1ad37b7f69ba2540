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


def ahead_of(score: object) -> Option:
    """The option for a score."""
    found = ahead_bytes(score)
    return ElementsAhead(found) if found else NothingAhead()


def ahead_bytes(score: object) -> int:
    """The bytes of such an element that a score reads, or 0."""
    return getattr(score, "ahead_bytes", 0)
