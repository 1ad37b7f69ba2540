"""This module says where the rows of a sequence lie in q, k, v and o."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import Dim, Field, Fields, Pointer, Violations
from .lengths import KvLens


@dataclasses.dataclass(frozen=True)
class Dense(Option):
    """Sequences of one length: (batch, length, heads, head_dim). The number of keys is read from k, so that one program serves
    many (``Operation.to_lower``)."""

    type: ClassVar[str] = "Dense"
    source: ClassVar[str] = "variant/rows/dense.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q_len", "i32"), Field("kv_len", "i32", Dim("k", -3)))


@dataclasses.dataclass(frozen=True)
class DenseSpan(Dense):
    """The same, where ``UsedKeys`` or ``CutQueries`` says that sequences end earlier, so that TMA brings zeros behind them."""

    type: ClassVar[str] = "DenseSpan"
    source: ClassVar[str] = "variant/rows/dense_span.cuh"


@dataclasses.dataclass(frozen=True)
class PackGqa(Dense):
    """The same, the heads that share a key head side by side: a row for each query and each of them."""

    type: ClassVar[str] = "PackGqa"
    source: ClassVar[str] = "variant/rows/pack_gqa.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("pack_gqa_heads", "i32"))


@dataclasses.dataclass(frozen=True)
class _OfPackGqa(Wrapper):
    """An option that knows queries and one head, as such rows need it: each row has that of its own."""

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.base.cuda_type}, Rows>"


@dataclasses.dataclass(frozen=True)
class PackGqaMask(_OfPackGqa):
    """The mask that such rows need."""

    type: ClassVar[str] = "PackGqaMask"
    source: ClassVar[str] = "variant/rows/pack_gqa_of.cuh"


@dataclasses.dataclass(frozen=True)
class PackGqaScore(_OfPackGqa):
    """The score that such rows need."""

    type: ClassVar[str] = "PackGqaScore"
    source: ClassVar[str] = "variant/rows/pack_gqa_of.cuh"


@dataclasses.dataclass(frozen=True)
class Varlen(Option):
    """Sequences of any lengths, end to end: (total, heads, head_dim); cu_seqlens hold where each begins."""

    type: ClassVar[str] = "Varlen"
    source: ClassVar[str] = "variant/rows/varlen.cuh"

    @property
    def fields(self) -> Fields:
        starts = [Field(name, "const i32*", Pointer(name)) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        return (*starts, Field("total_q", "i32"), Field("total_kv", "i32"), Field("violations", "u32*", Violations()))


@dataclasses.dataclass(frozen=True)
class WithOffset(Wrapper):
    """Rows whose tensors are a part of longer sequences: ``q_offset`` and ``kv_offset`` are the positions of their first rows."""

    type: ClassVar[str] = "WithOffset"
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
    type: ClassVar[str] = "CacheRows"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{'PackedQueries' if self.varlen else 'SameQueries'}, {self.lengths.cuda_type}>"

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


@dataclasses.dataclass(frozen=True)
class TmaCacheRows(CacheRows):
    """The same where TMA reads the queries; with one head each where ``pack_gqa_heads`` is 1."""

    type: ClassVar[str] = "TmaCacheRows"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*super().sources, "variant/rows/tma_queries.cuh")


@dataclasses.dataclass(frozen=True)
class StridedCacheRows(CacheRows):
    """The same where threads read tiles of the queries."""

    type: ClassVar[str] = "StridedCacheRows"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*super().sources, "variant/rows/strided_queries.cuh")


@dataclasses.dataclass(frozen=True)
class KvBeginRows(Wrapper):
    """A step's rows where ``kv_begin`` says which key of a sequence is the first that counts. ``KvBeginMask`` goes with it."""

    type: ClassVar[str] = "KvBeginRows"
    source: ClassVar[str] = "variant/rows/kv_begin.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("kv_begin", "const i32*", Pointer("kv_begin")))


@dataclasses.dataclass(frozen=True)
class CausalEachRows(Wrapper):
    """A step's rows where ``causal`` says which sequences are causal. ``CausalEachMask`` goes with it."""

    type: ClassVar[str] = "CausalEachRows"
    source: ClassVar[str] = "variant/rows/causal_each.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("causal", "const i32*", Pointer("causal")))


@dataclasses.dataclass(frozen=True)
class AtPositionsRows(Wrapper):
    """A step's rows where functions see positions. ``AtPositionsScore`` goes with it."""

    type: ClassVar[str] = "AtPositionsRows"
    source: ClassVar[str] = "variant/rows/at_positions.cuh"


@dataclasses.dataclass(frozen=True)
class RowsByQueryCount(Wrapper):
    """Rows of the sequences of a step with up to ``few_queries`` queries, or of those with more. ``base`` is over caches."""

    few: bool
    type: ClassVar[str] = "RowsByQueryCount"
    source: ClassVar[str] = "variant/rows/by_query_count.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.base.cuda_type}, {'Few' if self.few else 'Many'}>"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("few_queries", "i32"))


@dataclasses.dataclass(frozen=True)
class UsedKeys(Wrapper):
    """Rows of sequences of which ``kv_lens`` says how many keys are there, whatever lies behind them."""

    type: ClassVar[str] = "UsedKeys"
    source: ClassVar[str] = "variant/rows/used_keys.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("kv_lens", "const i32*", Pointer("kv_lens")))


@dataclasses.dataclass(frozen=True)
class UsedQueries(Wrapper):
    """Rows of sequences of which ``q_lens`` says how many queries are used. ``UsedQueriesMask`` goes with it; ``PackGqa`` does
    not."""

    type: ClassVar[str] = "UsedQueries"
    source: ClassVar[str] = "variant/rows/used_queries.cuh"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("q_lens", "const i32*", Pointer("q_lens")))


@dataclasses.dataclass(frozen=True)
class CutQueries(UsedQueries):
    """The same where the other rows of q are as if they were not there, whatever they hold: in the backward. The mask needs
    nothing for it."""

    type: ClassVar[str] = "CutQueries"
    source: ClassVar[str] = "variant/rows/cut_queries.cuh"
