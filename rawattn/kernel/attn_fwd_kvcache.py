"""attn_fwd.cu over caches: attention of many queries over cached keys (chunked prefill, long drafts) on Hopper."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from ..compiler import Source
from ..device import Device
from ..operand import Layout
from ..operation import AttentionKVCache, Forward
from ..program import Field, Fields, Launch, PackedHeads, PageRows, Program, TensorMap
from ..variant import Option, constant_time, kv, rows, scheduler, softmax, store, weight
from ..variant.walk import PagedWalk, lists
from . import paging, tiling
from .attn_fwd import ATTN_FWD, AttnFwd, Config, rendered
from .base import Kernel
from .paging import LONGEST, SWIZZLE_ROWS, WHOLE, page_shift


@functools.lru_cache(maxsize=1024)
def over_tensors(op: AttentionKVCache) -> Forward:
    """The forward with these queries whose keys are plain tensors: as many tiles, of the same kinds."""
    kv_len = min(op.kv_len, LONGEST)
    sizes = op.batch, op.q_len, kv_len, op.heads, op.kv_heads, op.head_dim, op.head_dim_v
    total_kv = min(op.batch * kv_len, LONGEST)
    return Forward(op.element, *sizes, op.spec, op.ragged, op.total_q, total_kv, op.sinks, op.layout)


@functools.lru_cache(maxsize=1024)
def in_rows(op: AttentionKVCache) -> Forward:
    """The same as tiles see it whose rows are the queries of all heads that share a key head."""
    n = op.heads_per_kv
    return dataclasses.replace(over_tensors(op), q_len=op.q_len * n, total_q=op.total_q * n, heads=op.kv_heads)


def page_rows(op: AttentionKVCache, config: Config) -> int:
    """Rows of a tile that lie in one page wherever it begins."""
    return config.tile_kv if page_shift(op) == WHOLE else math.gcd(op.page_size, config.tile_kv)


class AttnFwdKVCache(Kernel[AttentionKVCache]):
    """The kernel. Configurations are those of the forward over plain tensors, by the same records."""

    name = "attn_fwd"
    config_type = Config
    has_records = True

    @property
    def recorded(self) -> AttnFwd:
        return ATTN_FWD

    def runs_on(self, device: Device) -> bool:
        return ATTN_FWD.runs_on(device)

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        found = ATTN_FWD.supports(over_tensors(op), device) + paging.reasons(op) + paging.storage_reasons(op)
        if 1 << page_shift(op) < SWIZZLE_ROWS:
            found.append(f"the cache has page_size {op.page_size}; it takes pages of {SWIZZLE_ROWS} keys or more")
        if lists(op.mask):
            found.append("its mask leaves holes between the key tiles that it visits; over caches it takes none")
        return found

    def layout_reason(self, layout: Layout) -> str | None:
        return ATTN_FWD.layout_reason(layout)

    def legal(self, config: Config, op: AttentionKVCache, device: Device) -> str | None:
        return ATTN_FWD.legal(config, over_tensors(op), device)

    def candidates(self, op: Any, device: Device) -> list[Config]:
        return ATTN_FWD.candidates(_forward(op), device)

    def cost(self, config: Config, op: Any, device: Device) -> float:
        return ATTN_FWD.cost(config, _forward(op), device)

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[Any, ...]:
        return ATTN_FWD.tuning_shapes(over_tensors(op))

    def packs(self, op: AttentionKVCache, config: Config) -> bool:
        """Says whether a tile's rows are the queries of all heads that share a key head: sequences with few rows fill tiles then,
        and fewer tiles are cut by a causal mask."""
        heads = op.heads_per_kv
        return heads > 1 and config.tile_q % heads == 0 and max(op.q_len, op.total_q) * heads < LONGEST

    def options(self, op: AttentionKVCache, config: Config) -> dict[str, Option]:
        """The option on each axis."""
        like, packs = over_tensors(op), self.packs(op, config)
        found: dict[str, Option] = {
            "Element": op.element,
            "Rows": rows.TmaCacheRows(op.ragged, paging.lengths_option(op)),
            "Mask": rows.PackGqaMask(op.mask) if packs else op.mask,  # type: ignore[dict-item, arg-type]  # Masks are Options
            "Score": rows.PackGqaScore(op.score) if packs else op.score,  # type: ignore[dict-item, arg-type]  # so are Scores
            "Weight": weight.Identity(),
            "Softmax": softmax.WithSink(softmax.SpeculativeMax()) if op.sinks else softmax.SpeculativeMax(),
            "Kv": kv.PagedPanelsKv(paging.pages_option(op), page_rows(op, config)),
            "Scheduler": scheduler.SaidScheduler(tiling.lpt_scheduler(like, persistent=True)),
            "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
            "Order": ATTN_FWD.order(like, config),
            "Walk": PagedWalk(),
        }
        return constant_time(found) if op.spec.constant_time else found

    def fields(self, op: AttentionKVCache, config: Config) -> Fields:
        """The fields of struct Args, in order."""
        box_rows = page_rows(op, config)
        q = Field("q", "TmaTensor", TensorMap("q", config.tile_q))
        if self.packs(op, config):
            q = Field("q", "TmaHeads", PackedHeads("q", config.tile_q, op.heads_per_kv))
        tensors = [q]
        tensors += [Field(name, "TmaPageRows", PageRows(f"{name}_cache", box_rows)) for name in "kv"]
        return tuple(dict.fromkeys(tiling.fields(tensors, self.options(op, config))))

    def render(self, op: AttentionKVCache, config: Config, arch: str) -> Source:
        """The source of operations of one kind."""
        return rendered(over_tensors(op), config, arch, self.fields(op, config), self.options(op, config))

    def values(self, op: AttentionKVCache, config: Config, device: Device) -> dict[str, float]:
        """The run-time numbers of struct Args."""
        packs = self.packs(op, config)
        found = tiling.values(self._tiled(op, config), config.tile_q, device) | paging.values(op)
        return found | {"pack_gqa_heads": op.heads_per_kv if packs else 1}

    def _tiled(self, op: AttentionKVCache, config: Config) -> Forward:
        """The forward that has as many tiles."""
        return in_rows(op) if self.packs(op, config) else over_tensors(op)

    def lower(self, op: AttentionKVCache, config: Config, device: Device) -> Program:
        """The launch; none where no row is computed."""
        if not op.total_q * op.batch:
            return Program(())
        arch, like = device.arch, over_tensors(op)
        key = (like.kind, op.form, page_rows(op, config), self.packs(op, config) and op.heads_per_kv, config, arch)
        source, fields = self._kept(key, lambda: (self.render(op, config, arch), self.fields(op, config)))
        grid = ATTN_FWD.grid(self._tiled(op, config), config, device)
        return Program((Launch(self.name, source, fields, self.values(op, config, device), grid),))


def _forward(op: Any) -> Forward:
    """The forward of an operation over a cache; a tuning shape is one already."""
    return op if isinstance(op, Forward) else over_tensors(op)


ATTN_FWD_KVCACHE = AttnFwdKVCache()
