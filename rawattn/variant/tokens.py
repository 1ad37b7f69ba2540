"""This module says which row of which sequence a new row is."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Pointer


@dataclasses.dataclass(frozen=True)
class SameTokens(Option):
    """As many new rows for each sequence: (batch, q_len, heads, columns)."""

    type: ClassVar[str] = "SameTokens"
    source: ClassVar[str] = "variant/append/tokens_same.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("q_len", "i32"),)


@dataclasses.dataclass(frozen=True)
class PackedTokens(Option):
    """New rows end to end, (total, heads, columns); cu_seqlens_q hold where each sequence begins."""

    type: ClassVar[str] = "PackedTokens"
    source: ClassVar[str] = "variant/append/tokens_packed.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("cu_seqlens_q", "const i32*", Pointer("cu_seqlens_q")), Field("batches", "i32"), Field("max_q_len", "i32"))
