"""This module says where key and value bytes come from."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Field, Fields, Pointer
from . import Option


@dataclasses.dataclass(frozen=True)
class TmaKv(Option):
    """Plain strided tensors, read by TMA."""

    type: ClassVar[str] = "TmaKv"
    source: ClassVar[str] = "variant/kv/tma.cuh"


@dataclasses.dataclass(frozen=True)
class CpAsyncKv(Option):
    """Plain strided tensors, read by every thread with asynchronous copies of 16 bytes."""

    type: ClassVar[str] = "CpAsyncKv"
    source: ClassVar[str] = "variant/kv/cp_async.cuh"


@dataclasses.dataclass(frozen=True)
class PagedKv(Option):
    """Pools of pages; sequence i is page i, or has a row of ``page_table``. TMA reads blocks of ``page_rows`` rows, a multiple of
    8 that lies in one page; with ``cp_async`` a warp copies them, of pages of any size."""

    table: bool
    page_rows: int
    cp_async: bool = False
    type: ClassVar[str] = "PagedKv"

    @property
    def cuda_type(self) -> str:
        return f"{'PagedCpAsyncKv' if self.cp_async else 'PagedTmaKv'}<{'PageTable' if self.table else 'OnePage'}>"

    @property
    def sources(self) -> tuple[str, ...]:
        pages, copy = "page_table" if self.table else "one_page", "paged_cp_async" if self.cp_async else "paged_tma"
        return (f"variant/kv/{pages}.cuh", f"variant/kv/{copy}.cuh")

    @property
    def constants(self) -> dict[str, int]:
        return {"page_rows": self.page_rows}

    @property
    def fields(self) -> Fields:
        if not self.table:
            return ()
        table = Field("page_table", "const i32*", Pointer("page_table"))
        return (table, Field("page_table_stride", "i64"), Field("page_shift", "i32"))
