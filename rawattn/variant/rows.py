"""This module says where the rows of a sequence are in q, k, v and o."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import Dim, Field, Fields, Pointer, View, Violations
from .kv import KvLens


class Dense(Option):
    """Sequences of one length: (batch, length, heads, head_dim). The number of keys is read from k, so that one program serves
    many (``Operation.to_lower``)."""

    source: ClassVar[str] = "variant/rows/dense.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q_len", "i32"), Field("kv_len", "i32", Dim("k", -3)))


class DenseSpan(Dense):
    """Dense sequences of which ``UsedKeys`` or ``CutQueries`` says when they end, so that TMA brings zeros behind them."""

    source: ClassVar[str] = "variant/rows/dense_span.cuh"


class PackGqa(Dense):
    """Dense sequences with a row for each query and each of the heads that share a key head, which are side by side."""

    source: ClassVar[str] = "variant/rows/pack_gqa.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("pack_gqa_heads", "i32"))


@dataclasses.dataclass(frozen=True)
class TmaPackGqa(PackGqa):
    """The same, where TMA reads them. Where ``UsedKeys`` says when keys end they are ``cut``: TMA brings zeros behind them."""

    cut: bool = False
    source: ClassVar[str] = "variant/rows/tma_pack_gqa.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{'BatchSpan' if self.cut else 'BatchEntry'}>"


class _OfPackGqa(Wrapper):
    """An option that knows queries and one head, in a kernel whose rows are of several heads: each row has its own."""

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}, Rows>"


class PackGqaMask(_OfPackGqa):
    """A mask for rows of several heads."""

    source: ClassVar[str] = "variant/rows/pack_gqa_of.cuh"


class PackGqaScore(_OfPackGqa):
    """The score that such rows need."""

    source: ClassVar[str] = "variant/rows/pack_gqa_of.cuh"


class Varlen(Option):
    """Sequences of any lengths, end to end: (total, heads, head_dim); cu_seqlens hold where each begins."""

    source: ClassVar[str] = "variant/rows/varlen.cuh"

    @property
    def fields(self) -> Fields:
        starts = [Field(name, "const i32*", Pointer(name)) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        return (*starts, Field("total_q", "i32"), Field("total_kv", "i32"), Field("violations", "u32*", Violations()))


class WithOffset(Wrapper):
    """Rows whose tensors are a part of longer sequences: ``q_offset`` and ``kv_offset`` are the positions of their first rows."""

    source: ClassVar[str] = "variant/rows/offset.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("q_offset", "i32"), Field("kv_offset", "i32"))


@dataclasses.dataclass(frozen=True)
class CacheRows(Option):
    """A step's queries over cached keys, the heads that share a key head side by side: as many for each sequence, (batch, length,
    heads, head_dim), or with ``varlen`` end to end, (total, heads, head_dim). ``kv_lens`` lie on the device; ``max_kv_len`` is
    what the cache has room for."""

    varlen: bool = False
    lengths: Option = KvLens()  # noqa: RUF009

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{'PackedQueries' if self.varlen else 'SameQueries'}, {self.lengths.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.lengths.sources, f"variant/rows/{'packed' if self.varlen else 'same'}_queries.cuh")

    @property
    def fields(self) -> Fields:
        lengths = (*self.lengths.fields, Field("pack_gqa_heads", "i32"))
        if not self.varlen:
            return (*lengths, Field("q_len", "i32"))
        cu_seqlens = Field("cu_seqlens_q", "const i32*", Pointer("cu_seqlens_q"))
        return (cu_seqlens, *lengths, Field("max_q_len", "i32"), Field("total_q", "i32"))


class TmaCacheRows(CacheRows):
    """A step's queries over cached keys where TMA reads them; with one head each where ``pack_gqa_heads`` is 1."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (*super().sources, "variant/rows/tma_queries.cuh")


class StridedCacheRows(CacheRows):
    """A step's queries over cached keys where threads read tiles of them."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (*super().sources, "variant/rows/strided_queries.cuh")


class OneQ(Option):
    """A row of q has all of its columns."""

    source: ClassVar[str] = "variant/q_columns/one.cuh"


class PairOfQ(Option):
    """A row of q has the columns that meet values, and one of ``q_rope`` the rest."""

    source: ClassVar[str] = "variant/q_columns/pair.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q_rope", "StridedTensor", View("q_rope")),)


class KvBeginRows(Wrapper):
    """A step's rows where ``kv_begin`` says which key of a sequence is the first that counts. ``KvBeginMask`` goes with it."""

    source: ClassVar[str] = "variant/rows/kv_begin.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("kv_begin", "const i32*", Pointer("kv_begin")))


class CausalEachRows(Wrapper):
    """A step's rows where ``causal`` says which sequences are causal. ``CausalEachMask`` goes with it."""

    source: ClassVar[str] = "variant/rows/causal_each.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("causal", "const i32*", Pointer("causal")))


class AtPositionsRows(Wrapper):
    """A step's rows where functions see positions. ``AtPositionsScore`` goes with it."""

    source: ClassVar[str] = "variant/rows/at_positions.cuh"


@dataclasses.dataclass(frozen=True)
class RowsByQueryCount(Wrapper):
    """Rows of the sequences of a step with up to ``few_queries`` queries, or of those with more. ``base`` is over caches."""

    few: bool
    source: ClassVar[str] = "variant/rows/by_query_count.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.cuda_name}<{self.base.cuda_type}, {'Few' if self.few else 'Many'}>"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("few_queries", "i32"))


class UsedKeys(Wrapper):
    """Rows of sequences of which ``kv_lens`` says how many keys are there, whatever lies behind them."""

    source: ClassVar[str] = "variant/rows/used_keys.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("kv_lens", "const i32*", Pointer("kv_lens")))


class UsedQueries(Wrapper):
    """Rows of sequences of which ``q_lens`` says how many queries are used. ``UsedQueriesMask`` goes with it; ``PackGqa`` does
    not."""

    source: ClassVar[str] = "variant/rows/used_queries.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("q_lens", "const i32*", Pointer("q_lens")))


class CutQueries(UsedQueries):
    """Rows of sequences of which ``q_lens`` says how many queries are there, in the backward, whatever the other rows of q hold.
    The mask needs nothing for it."""

    source: ClassVar[str] = "variant/rows/cut_queries.cuh"
