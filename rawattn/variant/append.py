"""This module has what ``append`` writes: which rows are new, where they go and in which format, which queries are rotated, and
how."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .element import BF16
from .field import Field, Fields, Pointer, Stride, View


class SameTokens(Option):
    """Each sequence has as many new rows: (batch, q_len, heads, columns)."""

    source: ClassVar[str] = "variant/append/tokens_same.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q_len", "i32"),)


class PackedTokens(Option):
    """New rows are end to end, (total, heads, columns), and ``cu_seqlens_q`` has where each sequence begins."""

    source: ClassVar[str] = "variant/append/tokens_packed.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("cu_seqlens_q", "const i32*", Pointer("cu_seqlens_q")), Field("batches", "i32"), Field("max_q_len", "i32"))


@dataclasses.dataclass(frozen=True)
class InPages(Option):
    """A new row goes to its place among the keys of its sequence."""

    lengths: Option
    pages: Option
    source: ClassVar[str] = "variant/append/place_in_pages.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.lengths.cuda_type}, {self.pages.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.lengths.sources, *self.pages.sources, self.source)

    @property
    def fields(self) -> Fields:
        return (*self.lengths.fields, *self.pages.fields, Field("pages", "i32"))


class Slots(Option):
    """``slots`` say where each new row goes."""

    source: ClassVar[str] = "variant/append/place_slots.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("slots", "const i64*", Pointer("slots")), Field("pages", "i32"), Field("page_size", "i32"))


class Nowhere(Option):
    """There are no new rows: queries alone are rotated."""

    source: ClassVar[str] = "variant/append/place_nowhere.cuh"


class SameStorage(Option):
    """A cache holds a number in its own format."""

    source: ClassVar[str] = "variant/append/storage_same.cuh"


@dataclasses.dataclass(frozen=True)
class QuantizedStorage(Option):
    """A cache holds a number divided by the scale of keys, ``k``, or of values, ``v``, in another format."""

    k: Option
    v: Option
    source: ClassVar[str] = "variant/append/storage_quantized.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.k.cuda_type}, {self.v.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.k.sources, *self.v.sources, self.source)

    @property
    def fields(self) -> Fields:
        return (*self.k.fields, *self.v.fields)


class RecordStorage(Option):
    """A cache holds records: columns in e4m3, with a scale for each 128 of them that follows from these, and columns in bf16."""

    source: ClassVar[str] = "variant/append/storage_record.cuh"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*BF16.sources, self.source)


class NoQueries(Option):
    """No queries are rotated."""

    source: ClassVar[str] = "variant/append/queries.cuh"


class QueriesInPlace(Option):
    """The queries of q are rotated in place."""

    source: ClassVar[str] = "variant/append/queries.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q", "StridedTensor", View("q")), Field("heads", "i32"))


class QueriesApart(QueriesInPlace):
    """The rotated queries of q go to q_out."""

    source: ClassVar[str] = "variant/append/queries.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("q_out", "StridedTensor", View("q_out")))


class RopeQueries(Wrapper):
    """The queries of ``base`` have the columns from ``rotary_first`` on alone."""

    source: ClassVar[str] = "variant/append/queries_rope.cuh"


class NoRotary(Option):
    """No row is rotated."""

    source: ClassVar[str] = "variant/rotary/none.cuh"


@dataclasses.dataclass(frozen=True)
class FromColumn(Wrapper):
    """Columns are rotated from the column ``first`` on; those before it stay as they are."""

    first: int
    source: ClassVar[str] = "variant/rotary/from_column.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return self.base.constants | {"rotary_first": self.first}


class KeyPositions(Wrapper):
    """A row's position is its place among the keys of its sequence, whose lengths the base knows."""

    source: ClassVar[str] = "variant/append/positions_keys.cuh"


class GivenPositions(Option):
    """``positions`` hold the position of each row."""

    source: ClassVar[str] = "variant/append/positions_given.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("positions", "const i64*", Pointer("positions")),)


@dataclasses.dataclass(frozen=True)
class RotaryPairs(Option):
    """Pairs of the first ``rotary_dim`` columns are rotated: i and i + rotary_dim / 2, or with ``interleaved`` 2 i and 2 i + 1.
    ``angle`` is the C++ type of cosines and sines, "Number" or "Element"."""

    positions: Option
    rotary_dim: int
    interleaved: bool = False
    angle: str = "Number"

    @property
    def cuda_type(self) -> str:
        return f"{'Interleaved' if self.interleaved else 'Neox'}<{self.angle}, {self.positions.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.positions.sources, f"variant/rotary/{'interleaved' if self.interleaved else 'neox'}.cuh")

    @property
    def constants(self) -> dict[str, int]:
        return {"rotary_dim": self.rotary_dim}

    @property
    def fields(self) -> Fields:
        angles = [Field(name, f"const {self.angle}*", Pointer(name)) for name in ("cos", "sin")]
        angles += [Field(f"{name}_stride", "i64", Stride(name, "line")) for name in ("cos", "sin")]
        return (*angles, Field("max_positions", "i64"), *self.positions.fields)
