"""This module says where key and value bytes come from; which pages of a cache a sequence has, how many keys, and with which
scales."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import AxisStride, Field, Fields, Pointer, Stride


class TmaKv(Option):
    """Plain strided tensors, read by TMA."""

    source: ClassVar[str] = "variant/kv/tma.cuh"


class CpAsyncKv(Option):
    """Plain strided tensors, read by every thread with asynchronous copies of 16 bytes."""

    source: ClassVar[str] = "variant/kv/cp_async.cuh"


class NumbersKv(Option):
    """Plain strided tensors, whose rows threads read and widen."""

    source: ClassVar[str] = "variant/kv/numbers.cuh"


class OnePage(Option):
    """Sequence i has page i."""

    source: ClassVar[str] = "variant/pages/one_page.cuh"


class PageTable(Option):
    """A sequence's pages are a row of page_table."""

    source: ClassVar[str] = "variant/pages/page_table.cuh"

    @property
    def fields(self) -> Fields:
        table = Field("page_table", "const i32*", Pointer("page_table"))
        return (table, Field("page_table_stride", "i64", Stride("page_table", "line")), Field("page_shift", "i32"))


class PageList(Option):
    """The pages of all sequences are in one list, end to end."""

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
    source: ClassVar[str] = "variant/kv/paged_tma.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {**self.base.constants, "page_rows": self.page_rows}


class SmallPagesTmaKv(PagedTmaKv):
    """Pools of small pages, whose boxes one lane issues."""

    source: ClassVar[str] = "variant/kv/small_pages_tma.cuh"


class PagedCpAsyncKv(PagedTmaKv):
    """Pools of pages of any size, which warps copy; ``page_rows`` are those of a tile."""

    source: ClassVar[str] = "variant/kv/paged_cp_async.cuh"


class PagedPanelsKv(PagedTmaKv):
    """Pools of pages that TMA reads for wgmma, in panels of 64 columns."""

    source: ClassVar[str] = "variant/kv/paged_panels.cuh"


class PagedBoxesKv(PagedPanelsKv):
    """Pools of small pages, each of which TMA reads at once: all columns, a multiple of 64."""

    source: ClassVar[str] = "variant/kv/paged_boxes.cuh"


class PagedPanelsFromKv(PagedPanelsKv):
    """Pools of pages, in panels, of sequences whose first keys do not count."""

    source: ClassVar[str] = "variant/kv/paged_panels_from.cuh"


@dataclasses.dataclass(frozen=True)
class PagedCopiesKv(Wrapper):
    """Pools of pages of few rows, which ``warps`` copy for wgmma, in panels; the base says which of them a sequence has."""

    warps: int
    source: ClassVar[str] = "variant/kv/paged_copies.cuh"

    @property
    def constants(self) -> dict[str, int]:
        return {**self.base.constants, "copying_warps": self.warps}


class LatentPanelsKv(PagedTmaKv):
    """Pools of pages whose values are the first columns of their keys, in panels; a page has the rows of a tile, or more."""

    source: ClassVar[str] = "variant/kv/latent_panels.cuh"


class LatentSharedPanelsKv(LatentPanelsKv):
    """The same for clusters of blocks, each of which brings a part of a tile's rows to all."""

    source: ClassVar[str] = "variant/kv/latent_shared_panels.cuh"


class LatentBoxesKv(PagedTmaKv):
    """The same of small pages, each of which TMA reads at once."""

    source: ClassVar[str] = "variant/kv/latent_boxes.cuh"


class PagedKeys(Wrapper):
    """Keys of sequences in pages of any size, one by one."""

    source: ClassVar[str] = "variant/pages/paged_keys.cuh"


class LatentRowsKv(Wrapper):
    """Caches whose values are the first columns of their keys, whose rows threads copy; the base says where each key is."""

    source: ClassVar[str] = "variant/kv/latent_rows.cuh"


class LatentRecordsKv(LatentRowsKv):
    """The same of records, which TMA brings and threads make numbers of."""

    source: ClassVar[str] = "variant/kv/latent_records.cuh"


class LatentSharedRecordsKv(LatentRecordsKv):
    """The same for clusters of blocks, each of which makes numbers of a part of a tile's rows for all."""

    source: ClassVar[str] = "variant/kv/latent_shared_records.cuh"


class PagedRowsKv(Wrapper):
    """Pools of pages of any size, which all threads of a block copy; the base says which of them a sequence has."""

    source: ClassVar[str] = "variant/kv/paged_rows.cuh"


class PagedRowsWidenedKv(PagedRowsKv):
    """Pools of pages in eight bits, of which threads make numbers of 16."""

    source: ClassVar[str] = "variant/kv/paged_rows_widened.cuh"


class PagedRecordsKv(PagedRowsKv):
    """Pools of pages of records, of which threads make numbers of 16 bits in shared memory."""

    source: ClassVar[str] = "variant/kv/paged_records.cuh"


class Turns(Option):
    """K and V tiles take turns in the slots of a ring."""

    source: ClassVar[str] = "variant/slots/turns.cuh"


class VInK(Option):
    """A key tile has one slot: V is the first columns of K."""

    source: ClassVar[str] = "variant/slots/v_in_k.cuh"


class PagedNumbersKv(Wrapper):
    """Pools of pages of any size, whose rows threads read and widen."""

    source: ClassVar[str] = "variant/kv/paged_numbers.cuh"


class KvLens(Option):
    """``kv_lens`` hold how many keys a sequence has; ``max_kv_len`` is what the cache has room for."""

    source: ClassVar[str] = "variant/pages/kv_lens.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("kv_lens", "const i32*", Pointer("kv_lens")), Field("max_kv_len", "i32"))


class PageListLens(Option):
    """The number of keys follows from that of a sequence's pages, end to end with those of others, and from last_page_len."""

    source: ClassVar[str] = "variant/pages/kv_lens_of_list.cuh"

    @property
    def fields(self) -> Fields:
        arrays = [Field(name, "const i32*", Pointer(name)) for name in ("indptr", "last_page_len")]
        return (*arrays, Field("page_shift", "i32"), Field("max_kv_len", "i32"))


@dataclasses.dataclass(frozen=True)
class CacheScale(Option):
    """A number by which a cache in eight bits is multiplied; ``name`` is "k_scale" or "v_scale"."""

    name: str
    source: ClassVar[str] = "variant/scale/cache_scale.cuh"

    @property
    def cuda_type(self) -> str:
        return f"CacheScale<&Args::{self.name}>"

    @property
    def fields(self) -> Fields:
        return (Field(self.name, "float"),)


class CacheScales(CacheScale):
    """An array of scales, (batch, kv_heads)."""

    @property
    def cuda_type(self) -> str:
        return f"CacheScales<{', '.join(f'&Args::{field.name}' for field in self.fields)}>"

    @property
    def fields(self) -> Fields:
        steps = (Field(f"{self.name}_{axis}", "i64", AxisStride(self.name, i)) for i, axis in enumerate(("batch", "head")))
        return (Field(self.name, "const float*", Pointer(self.name)), *steps)


def scales(k_scales: bool, v_scales: bool) -> tuple[CacheScale, CacheScale]:
    """The scales of keys and of values, which are arrays or numbers."""
    k, v = ((CacheScales if is_array else CacheScale)(name) for name, is_array in (("k_scale", k_scales), ("v_scale", v_scales)))
    return k, v
