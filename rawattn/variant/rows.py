"""Where the rows of a sequence lie in q, k, v and o."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Choice, Fields


@dataclasses.dataclass(frozen=True)
class Dense(Choice):
    """Sequences of one length: (batch, length, heads, head_dim)."""

    type: ClassVar[str] = "Dense"
    source: ClassVar[str] = "variant/rows/dense.cuh"

    @property
    def fields(self) -> Fields:
        return (("q_len", "i32"), ("kv_len", "i32"))


@dataclasses.dataclass(frozen=True)
class Varlen(Choice):
    """Sequences of any lengths, end to end: (total, heads, head_dim); cu_seqlens hold where each begins."""

    type: ClassVar[str] = "Varlen"
    source: ClassVar[str] = "variant/rows/varlen.cuh"

    @property
    def fields(self) -> Fields:
        return (("cu_seqlens_q", "const i32*"), ("cu_seqlens_kv", "const i32*"), ("total_q", "i32"))
