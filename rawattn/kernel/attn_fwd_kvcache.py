"""attn_fwd.cu over caches: attention of many queries over cached keys (chunked prefill, long drafts) on Hopper."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..array.tma import BOX_COLUMNS, SWIZZLE_ROWS
from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache, Forward
from ..variant import Option, kv, rows, scheduler
from ..variant.ahead import ahead_of
from ..variant.field import Field, Fields, PackedHeads, PageBoxes, PagePool, PageRows, TensorMap
from ..variant.mask import And, Causal, Full, Window
from ..variant.walk import PagedCopiesWalk, PagedListWalk, PagedWalk, lists
from . import combine, few_rows, paging, tiling
from .attn_fwd import ATTN_FWD, AttnFwdConfig, rendered, split_tiles, unnumbered
from .attn_fwd_mma_kvcache import ATTN_FWD_MMA_KVCACHE
from .paging import LONGEST, WHOLE, OverCache, forward_of, over_tensors, page_shift
from .program import Program


def page_rows(op: AttentionKVCache, config: Any) -> int:
    """Rows of a tile that lie in one page wherever it begins."""
    return config.tile_kv if page_shift(op) == WHOLE else math.gcd(op.page_size, config.tile_kv)


def kv_option(op: AttentionKVCache, config: Any, warps: int) -> Option:
    """The option for where keys and values come from; ``warps`` copy what TMA does not."""
    kind = kv_kind(op, config)
    option: Option = kind(kv.PAGES[op.form], warps if kind is kv.PagedCopiesKv else page_rows(op, config))
    return option


def kv_kind(op: AttentionKVCache, config: Any) -> type[Any]:
    """The class of that option. A small page is one box where its rows are whole panels, two or more; with one panel that saves
    no boxes, and is slower (perf/notes/attn_decode.md)."""
    if paging.has_tiny_pages(op):
        return kv.PagedCopiesKv
    if op.kv_begin:
        return kv.PagedPanelsFromKv
    has_panels = all(n % BOX_COLUMNS == 0 and n > BOX_COLUMNS for n in (op.head_dim, op.head_dim_v))
    return kv.PagedBoxesKv if has_panels and paging.has_small_pages(op, config.tile_kv) else kv.PagedPanelsKv


def pools(op: AttentionKVCache, config: Any) -> list[Field]:
    """The fields of keys and values."""
    kind = kv_kind(op, config)
    if kind is kv.PagedCopiesKv:
        return [Field(name, "StridedPages", PagePool(f"{name}_cache", 0)) for name in "kv"]
    if kind is kv.PagedBoxesKv:
        boxes = [Field(name, "TmaPageBoxes", PageBoxes(f"{name}_cache")) for name in "kv"]
        return [*boxes, Field("v_end", "TmaPageRows", PageRows("v_cache", SWIZZLE_ROWS))]
    return [Field(name, "TmaPageRows", PageRows(f"{name}_cache", page_rows(op, config))) for name in "kv"]


def is_plain(op: Any) -> bool:
    """Says whether the mask of an operation, or of a tuning shape, is causal or full, for all keys of all sequences."""
    return isinstance(op.mask, (Full, Causal)) and (isinstance(op, Forward) or not any(paging.arrays_of(op)))


class AttnFwdKVCache(OverCache):
    """attn_fwd over caches."""

    name, plain = "attn_fwd", ATTN_FWD
    places_back = 2.5  # behind attn_fwd_mma
    config_type = AttnFwdConfig

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = super().supports(op, device)
        if paging.has_tiny_pages(op) and lists(op.mask):
            sizes = f"the mask has holes and the cache page_size {op.page_size}"
            reasons.append(f"{sizes}; it takes pages of {SWIZZLE_ROWS} keys or more then")
        return reasons

    def prefers(self, op: AttentionKVCache, device: Device) -> bool:
        """Says no where another kernel's tiles, which any number of heads share, take less time and fill the device: that kernel
        does not split the keys of heads up to 256."""
        blocks = -(-op.q_len * op.heads_per_kv // 32) * op.kv_heads * op.batch
        if op.spec.invariant or 128 % op.heads_per_kv == 0 or blocks < device.sm_count:
            return True
        return not few_rows.is_outrun(self, ATTN_FWD_MMA_KVCACHE, op, device)

    def legal(self, config: AttnFwdConfig, op: Any, device: Device) -> str | None:
        tight = config.consumers == 4 or (config.consumers == 3 and config.tile_kv > 96)  # found by trying
        if tight and not is_plain(op):
            tiles = f"tile_q is {config.tile_q} and tile_kv {config.tile_kv}"
            return f"{tiles}; it spills where the mask is neither causal nor full for all keys of all sequences"
        if config.pack_gqa:
            return "pack_gqa is True; over caches heads share tiles wherever they can"
        if config.ctas_per_sm != 1:
            return f"ctas_per_sm is {config.ctas_per_sm}; it must be 1 over caches"
        if config.tile_kv > 128 and isinstance(op, AttentionKVCache) and paging.has_tiny_pages(op):
            return f"tile_kv is {config.tile_kv}; where threads copy rows it must be up to 128"
        return ATTN_FWD.legal(config, forward_of(op), device)

    def candidates(self, op: Any, device: Device) -> list[AttnFwdConfig]:
        """Those over tensors, one block on a multiprocessor each. Keys of few rows are not split: the number of splits would
        follow from the batch, or scratch from the bound of lengths. Splits of tiles of 192 rows were not timed here."""
        forward = forward_of(op)
        configs = [dataclasses.replace(config, pack_gqa=False) for config in ATTN_FWD.candidates_of_one(forward, device)]
        if tiling.is_few(forward):
            configs = [dataclasses.replace(config, kv_splits=1) for config in configs]
        configs = [config for config in dict.fromkeys(configs) if config.kv_splits == 1 or config.tile_q <= 128]
        return [config for config in configs if self.legal(config, op, device) is None]

    def cost(self, config: AttnFwdConfig, op: Any, device: Device) -> float:
        if isinstance(op, Forward):
            shares = config.kv_splits == 0 and few_rows.may_share(op)
            return ATTN_FWD.cost(dataclasses.replace(config, pack_gqa=shares), op, device)
        return ATTN_FWD.seconds_of_few(config, over_tensors(op), device, self.rows_each(op, config))

    def rows_each(self, op: AttentionKVCache, config: AttnFwdConfig) -> int:
        """The rows that a query has in tiles."""
        return op.heads_per_kv if self.packs(op, config) else 1

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[Any, ...]:
        if paging.has_functions(op):
            return (paging.tried_shape(op),)
        forward = over_tensors(op)
        splits = few_rows.are_sparse(forward) and not tiling.is_few(forward)
        shapes = few_rows.tuning_shapes(forward, True) if splits else tiling.tuning_shapes(forward)
        if is_plain(op):
            return shapes
        return tuple(tiling.with_mask(shape, And(Causal(), Window())) for shape in shapes)

    def packs(self, op: AttentionKVCache, config: AttnFwdConfig) -> bool:
        heads = op.heads_per_kv
        return heads > 1 and config.tile_q % heads == 0 and max(op.q_len, op.total_q) * heads < LONGEST

    def options(self, op: AttentionKVCache, config: AttnFwdConfig) -> dict[str, Option]:
        if config.kv_splits == 1:
            return super().options(op, config)
        options = super().options(dataclasses.replace(op, sinks=False), config)  # which join where the splits are folded
        split = few_rows.options(options["Mask"])
        return options | split | {"Scheduler": scheduler.ReportingScheduler(split["Scheduler"])}

    def kernel_options(self, op: AttentionKVCache, config: AttnFwdConfig) -> dict[str, Option]:
        forward = over_tensors(op)
        order = tiling.lpt_scheduler(forward, persistent=True)
        if op.ragged and not op.kv_begin:  # with first keys it would spill, by Both in tiles of 128
            order = scheduler.TwoEndedScheduler()
        return {
            "Rows": rows.TmaCacheRows(op.ragged, paging.lengths_option(op)),
            "Kv": kv_option(op, config, 4),
            "Scheduler": scheduler.ReportingScheduler(order),
            "Ahead": ahead_of(op.score),
            "Order": ATTN_FWD.order(forward, config),
            "Walk": PagedListWalk() if lists(op.mask) else PagedCopiesWalk() if paging.has_tiny_pages(op) else PagedWalk(),
        }

    def fields(self, op: AttentionKVCache, config: AttnFwdConfig) -> Fields:
        q = Field("q", "TmaTensor", TensorMap("q", config.tile_q))
        if self.packs(op, config):
            q = Field("q", "TmaHeads", PackedHeads("q", config.tile_q, op.heads_per_kv))
        return tuple(dict.fromkeys(tiling.fields([q, *pools(op, config)], self.options(op, config))))

    def render(self, op: AttentionKVCache, config: AttnFwdConfig, arch: str) -> Source:
        return rendered(over_tensors(op), config, arch, self.fields(op, config), self.options(op, config))

    def grid(self, op: AttentionKVCache, config: AttnFwdConfig, device: Device) -> int:
        return ATTN_FWD.grid(self.tiled(op, config), config, device)

    def lower(self, op: AttentionKVCache, config: AttnFwdConfig, device: Device) -> Program:
        count = ATTN_FWD.count_splits(config, over_tensors(op), device, self.rows_each(op, config))
        return self._lower(op, config, device, count)

    def _lower(self, op: AttentionKVCache, config: AttnFwdConfig, device: Device, count: int) -> Program:
        """The program with so many splits."""
        whole = super().lower(op, unnumbered(config, count), device)
        if count == 1:
            return whole
        tiles = ATTN_FWD.tiles(self.tiled(op, config), config, device)._replace(
            rows_each=self.rows_each(op, config), splits=count
        )
        rendered = self._keep(("fold", op.kind, device.arch), lambda: combine.source_and_fields(op, device.arch))
        values = {"split_tiles": split_tiles(over_tensors(op), config)}
        return combine.folded(whole, op, tiles, op.total_q * op.heads, rendered, values)

    def programs(self, op: AttentionKVCache, config: AttnFwdConfig, device: Device) -> tuple[Program, ...]:
        numbers = (1, 2) if config.kv_splits == 0 else (config.kv_splits,)
        return tuple(self._lower(op, config, device, n) for n in numbers)

    def rendered_kind(self, op: AttentionKVCache, config: AttnFwdConfig) -> tuple[Any, ...]:
        pages = page_rows(op, config), kv_kind(op, config), self.packs(op, config) and op.heads_per_kv
        return (*super().rendered_kind(op, config), *pages)


ATTN_FWD_KVCACHE = AttnFwdKVCache()
