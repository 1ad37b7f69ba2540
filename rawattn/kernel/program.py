"""The program that a kernel makes of an operation, as plain values: launches with arguments, scratch memory between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ..compile.compiler import Source
from ..variant.field import Fields


class Tiles(Protocol):
    """The part of a launch that follows from the number of queries."""

    def at(self, q_len: int) -> tuple[Mapping[str, int], int]:
        """The launch's values that follow from ``q_len``, and its number of blocks."""


class Launch(NamedTuple):
    """One launch: the entry of a source, how many blocks, and what its arguments hold. ``tiles`` is the part of it that follows
    from the number of queries; None where that is not known, or nothing does."""

    entry: str
    source: Source
    fields: Fields
    values: Mapping[str, float]
    grid: int
    tiles: Tiles | None = None

    def at(self, q_len: int, tiles: Tiles) -> Launch:
        """The launch for ``q_len`` queries."""
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

    def with_values(self, values: Mapping[str, float]) -> Program:
        """The program whose launches have these values besides their own."""
        return self._replace(launches=tuple(each._replace(values={**each.values, **values}) for each in self.launches))


def offsets(scratch: tuple[Buffer, ...], alignment: int = 256) -> tuple[dict[str, int], int]:
    """The offset of each buffer in one allocation, by name, and the bytes of all."""
    begins, end = {}, 0
    for buffer in scratch:
        begins[buffer.name] = end
        end += -(-buffer.bytes // alignment) * alignment
    return begins, end
