"""This module says where key and value bytes come from."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Fields
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
    """Pools of pages; ``pages`` says which of them a sequence has (variant/place.py). TMA reads blocks of ``page_rows`` rows, a
    multiple of 8 that lies in one page; with ``cp_async`` a warp copies them, of pages of any size."""

    pages: Option
    page_rows: int
    cp_async: bool = False
    type: ClassVar[str] = "PagedKv"

    @property
    def cuda_type(self) -> str:
        return f"{'PagedCpAsyncKv' if self.cp_async else 'PagedTmaKv'}<{self.pages.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.pages.sources, f"variant/kv/paged_{'cp_async' if self.cp_async else 'tma'}.cuh")

    @property
    def constants(self) -> dict[str, int]:
        return {"page_rows": self.page_rows}

    @property
    def fields(self) -> Fields:
        return self.pages.fields


@dataclasses.dataclass(frozen=True)
class SmallPagesKv(PagedKv):
    """The same for small pages, whose boxes one lane issues."""

    @property
    def cuda_type(self) -> str:
        return f"SmallPagesTmaKv<{self.pages.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.pages.sources, "variant/kv/small_pages_tma.cuh")


@dataclasses.dataclass(frozen=True)
class PagedPanelsKv(Option):
    """Pools of pages, which TMA reads for wgmma in panels of 64 columns and blocks of ``page_rows`` rows, a multiple of 8 that
    lies in one page; ``pages`` says which of them a sequence has."""

    pages: Option
    page_rows: int
    type: ClassVar[str] = "PagedPanelsKv"
    file: ClassVar[str] = "variant/kv/paged_panels.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.pages.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.pages.sources, self.file)

    @property
    def constants(self) -> dict[str, int]:
        return {"page_rows": self.page_rows}

    @property
    def fields(self) -> Fields:
        return self.pages.fields


@dataclasses.dataclass(frozen=True)
class PagedBoxesKv(PagedPanelsKv):
    """The same for small pages, each of which TMA reads at once, all columns, which are a multiple of 64."""

    type: ClassVar[str] = "PagedBoxesKv"
    file: ClassVar[str] = "variant/kv/paged_boxes.cuh"


@dataclasses.dataclass(frozen=True)
class PagedPanelsFromKv(PagedPanelsKv):
    """The same for sequences whose first keys do not count."""

    type: ClassVar[str] = "PagedPanelsFromKv"
    file: ClassVar[str] = "variant/kv/paged_panels_from.cuh"


@dataclasses.dataclass(frozen=True)
class PagedRowsKv(Option):
    """Pools of pages of any size, which all threads of a block copy; ``pages`` says which of them a sequence has."""

    pages: Option
    type: ClassVar[str] = "PagedRowsKv"
    file: ClassVar[str] = "variant/kv/paged_rows.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.pages.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.pages.sources, self.file)

    @property
    def fields(self) -> Fields:
        return self.pages.fields


@dataclasses.dataclass(frozen=True)
class PagedRowsWidenedKv(PagedRowsKv):
    """The same in eight bits, which threads make numbers of 16."""

    type: ClassVar[str] = "PagedRowsWidenedKv"
    file: ClassVar[str] = "variant/kv/paged_rows_widened.cuh"
