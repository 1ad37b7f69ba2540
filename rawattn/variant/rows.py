"""Where the rows of a sequence lie in q, k, v and o."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Choice, Fields
from .mask import Mask


@dataclasses.dataclass(frozen=True)
class Dense(Choice):
    """Sequences of one length: (batch, length, heads, head_dim)."""

    type: ClassVar[str] = "Dense"
    source: ClassVar[str] = "variant/rows/dense.cuh"

    @property
    def fields(self) -> Fields:
        return (("q_len", "i32"), ("kv_len", "i32"))


@dataclasses.dataclass(frozen=True)
class Packed(Dense):
    """The same, the heads that share a key head side by side: a row for each query and each of them."""

    type: ClassVar[str] = "Packed"
    source: ClassVar[str] = "variant/rows/packed.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, ("packed_heads", "i32"))


@dataclasses.dataclass(frozen=True)
class OfQueries(Choice):
    """The mask that such rows need: each has the mask of its query."""

    mask: Mask
    source: ClassVar[str] = "variant/rows/packed.cuh"

    @property
    def cuda_type(self) -> str:
        return f"OfQueries<{self.mask.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.mask.sources, self.source)

    @property
    def constants(self) -> dict[str, int]:
        return self.mask.constants

    @property
    def fields(self) -> Fields:
        return self.mask.fields


@dataclasses.dataclass(frozen=True)
class Varlen(Choice):
    """Sequences of any lengths, end to end: (total, heads, head_dim); cu_seqlens hold where each begins."""

    type: ClassVar[str] = "Varlen"
    source: ClassVar[str] = "variant/rows/varlen.cuh"

    @property
    def fields(self) -> Fields:
        return (("cu_seqlens_q", "const i32*"), ("cu_seqlens_kv", "const i32*"), ("total_q", "i32"))
