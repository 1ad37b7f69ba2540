"""This module says how many keys a sequence has."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Field, Fields, Pointer


@dataclasses.dataclass(frozen=True)
class KvLens(Option):
    """kv_lens hold it. ``max_kv_len`` is what the cache has room for."""

    type: ClassVar[str] = "KvLens"
    source: ClassVar[str] = "variant/pages/kv_lens.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("kv_lens", "const i32*", Pointer("kv_lens")), Field("max_kv_len", "i32"))


@dataclasses.dataclass(frozen=True)
class PageListLens(Option):
    """It follows from how many pages a sequence has, end to end with those of others, and from last_page_len."""

    type: ClassVar[str] = "PageListLens"
    source: ClassVar[str] = "variant/pages/kv_lens_of_list.cuh"

    @property
    def fields(self) -> Fields:
        arrays = [Field(name, "const i32*", Pointer(name)) for name in ("indptr", "last_page_len")]
        return (*arrays, Field("page_shift", "i32"), Field("max_kv_len", "i32"))
