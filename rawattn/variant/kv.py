"""This module says where key and value bytes come from, and which pages of a cache a sequence has."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import Field, Fields, Pointer, Stride


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
class OnePage(Option):
    """Sequence i has page i."""

    type: ClassVar[str] = "OnePage"
    source: ClassVar[str] = "variant/pages/one_page.cuh"


@dataclasses.dataclass(frozen=True)
class PageTable(Option):
    """A sequence's pages are a row of page_table."""

    type: ClassVar[str] = "PageTable"
    source: ClassVar[str] = "variant/pages/page_table.cuh"

    @property
    def fields(self) -> Fields:
        table = Field("page_table", "const i32*", Pointer("page_table"))
        return (table, Field("page_table_stride", "i64", Stride("page_table", "line")), Field("page_shift", "i32"))


@dataclasses.dataclass(frozen=True)
class PageList(Option):
    """The pages of all sequences lie end to end."""

    type: ClassVar[str] = "PageList"
    source: ClassVar[str] = "variant/pages/page_list.cuh"

    @property
    def fields(self) -> Fields:
        arrays = [Field(name, "const i32*", Pointer(name)) for name in ("indptr", "indices")]
        return (*arrays, Field("indices_count", "i32"), Field("page_shift", "i32"))


PAGES: dict[str, Option] = {"dense": OnePage(), "table": PageTable(), "indptr": PageList()}  # by the form of a step


@dataclasses.dataclass(frozen=True)
class PagedTmaKv(Wrapper):
    """Pools of pages; the base says which of them a sequence has. TMA reads blocks of ``page_rows`` rows, a multiple of 8 that
    lies in one page."""

    page_rows: int
    type: ClassVar[str] = "PagedTmaKv"
    source: ClassVar[str] = "variant/kv/paged_tma.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {"page_rows": self.page_rows}


@dataclasses.dataclass(frozen=True)
class SmallPagesTmaKv(PagedTmaKv):
    """The same for small pages, whose boxes one lane issues."""

    type: ClassVar[str] = "SmallPagesTmaKv"
    source: ClassVar[str] = "variant/kv/small_pages_tma.cuh"


@dataclasses.dataclass(frozen=True)
class PagedCpAsyncKv(PagedTmaKv):
    """The same of pages of any size, which warps copy; ``page_rows`` are those of a tile."""

    type: ClassVar[str] = "PagedCpAsyncKv"
    source: ClassVar[str] = "variant/kv/paged_cp_async.cuh"


@dataclasses.dataclass(frozen=True)
class PagedPanelsKv(PagedTmaKv):
    """The same for wgmma, in panels of 64 columns."""

    type: ClassVar[str] = "PagedPanelsKv"
    source: ClassVar[str] = "variant/kv/paged_panels.cuh"


@dataclasses.dataclass(frozen=True)
class PagedBoxesKv(PagedPanelsKv):
    """The same for small pages, each of which TMA reads at once, all columns, which are a multiple of 64."""

    type: ClassVar[str] = "PagedBoxesKv"
    source: ClassVar[str] = "variant/kv/paged_boxes.cuh"


@dataclasses.dataclass(frozen=True)
class PagedPanelsFromKv(PagedPanelsKv):
    """The same for sequences whose first keys do not count."""

    type: ClassVar[str] = "PagedPanelsFromKv"
    source: ClassVar[str] = "variant/kv/paged_panels_from.cuh"


@dataclasses.dataclass(frozen=True)
class PagedRowsKv(Wrapper):
    """Pools of pages of any size, which all threads of a block copy; the base says which of them a sequence has."""

    type: ClassVar[str] = "PagedRowsKv"
    source: ClassVar[str] = "variant/kv/paged_rows.cuh"


@dataclasses.dataclass(frozen=True)
class PagedRowsWidenedKv(PagedRowsKv):
    """The same in eight bits, which threads make numbers of 16."""

    type: ClassVar[str] = "PagedRowsWidenedKv"
    source: ClassVar[str] = "variant/kv/paged_rows_widened.cuh"
