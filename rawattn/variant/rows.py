"""Where the rows of a sequence lie in q, k, v and o."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Field, Fields, Pointer
from . import Option
from .mask import Mask


@dataclasses.dataclass(frozen=True)
class Dense(Option):
    """Sequences of one length: (batch, length, heads, head_dim)."""

    type: ClassVar[str] = "Dense"
    source: ClassVar[str] = "variant/rows/dense.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q_len", "i32"), Field("kv_len", "i32"))


@dataclasses.dataclass(frozen=True)
class PackGqa(Dense):
    """The same, the heads that share a key head side by side: a row for each query and each of them."""

    type: ClassVar[str] = "PackGqa"
    source: ClassVar[str] = "variant/rows/pack_gqa.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("pack_gqa_heads", "i32"))


@dataclasses.dataclass(frozen=True)
class PackGqaMask(Option):
    """The mask that such rows need: each has the mask of its query."""

    mask: Mask
    source: ClassVar[str] = "variant/rows/pack_gqa.cuh"

    @property
    def cuda_type(self) -> str:
        return f"PackGqaMask<{self.mask.cuda_type}>"

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
class Varlen(Option):
    """Sequences of any lengths, end to end: (total, heads, head_dim); cu_seqlens hold where each begins."""

    type: ClassVar[str] = "Varlen"
    source: ClassVar[str] = "variant/rows/varlen.cuh"

    @property
    def fields(self) -> Fields:
        starts = [Field(name, "const i32*", Pointer(name)) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        return (*starts, Field("total_q", "i32"))
