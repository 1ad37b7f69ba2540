"""This module has what a kernel makes of an operation, as plain values: launches with arguments, scratch memory between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ..compile.compiler import Source
from ..variant.field import Fields


class Tiles(Protocol):
    """This says what of a launch follows from the number of queries."""

    def at(self, q_len: int) -> tuple[Mapping[str, int], int]:
        """These of its values, and the number of blocks."""


class Launch(NamedTuple):
    """One launch: the entry of a source, how many blocks, and what its arguments hold. ``tiles`` says what of it follows from the
    number of queries; None where that is not known, or nothing does."""

    entry: str
    source: Source
    fields: Fields
    values: Mapping[str, float]
    grid: int
    tiles: Tiles | None = None

    def at(self, q_len: int, tiles: Tiles) -> Launch:
        """The launch for so many queries."""
        values, grid = tiles.at(q_len)
        return self._replace(values={**self.values, **values}, grid=grid, tiles=tiles)

    def __str__(self) -> str:
        return f"{self.entry}, {self.grid} blocks"


class Buffer(NamedTuple):
    """A part of the scratch memory."""

    name: str
    bytes: int


class Program(NamedTuple):
    """The launches of an operation, in order, and the scratch memory that they share."""

    launches: tuple[Launch, ...]
    scratch: tuple[Buffer, ...] = ()

    @property
    def scratch_bytes(self) -> int:
        return offsets(self.scratch)[1]


def offsets(scratch: tuple[Buffer, ...], alignment: int = 256) -> tuple[dict[str, int], int]:
    """Returns where each buffer begins in one allocation, and the bytes of all."""
    found, end = {}, 0
    for buffer in scratch:
        found[buffer.name] = end
        end += -(-buffer.bytes // alignment) * alignment
    return found, end
