"""attn_fwd_mma.cu over caches: attention of many queries over cached keys on any GPU from Ampere on."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache, Forward
from ..operation.operand import Layout
from ..variant import Option, kv, rows, scheduler
from ..variant.field import Field, Fields, PagePool, View
from . import paging, pyramid, tiling
from .attn_fwd_mma import ATTN_FWD_MMA, AttnFwdMmaConfig
from .base import Kernel
from .paging import LONGEST, forward_of, over_tensors, packed_gqa
from .program import Launch, Program
from .render import config_header, source


class AttnFwdMmaKVCache(Kernel[AttentionKVCache]):
    """The kernel. Configurations are those of the forward over plain tensors; heads that share a key head share tiles."""

    name = "attn_fwd_mma"
    config_type = AttnFwdMmaConfig

    def runs_on(self, device: Device) -> bool:
        return ATTN_FWD_MMA.runs_on(device)

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        found = ATTN_FWD_MMA.supports(over_tensors(op), device) + paging.reasons_of_tiles(op, widens=True)
        return found + paging.reasons_of_eight_bits(op, device)

    def is_tried(self, op: Any) -> bool:
        return paging.has_functions(op)

    def layout_reason(self, layout: Layout) -> str | None:
        return ATTN_FWD_MMA.layout_reason(layout)

    def legal(self, config: AttnFwdMmaConfig, op: AttentionKVCache, device: Device) -> str | None:
        if config.split:
            return "split is True; over caches keys are not split"
        if config.pack_gqa and op.heads == op.kv_heads:
            return "pack_gqa is True; it needs several query heads for each key head"
        return ATTN_FWD_MMA.legal(dataclasses.replace(config, pack_gqa=False), self._tiled(op, config), device)

    def candidates(self, op: Any, device: Device) -> list[AttnFwdMmaConfig]:
        like = forward_of(op)
        packs = like.heads_per_kv > 1 and max(like.q_len, like.total_q) * like.heads_per_kv < LONGEST
        found = ATTN_FWD_MMA.candidates(like, device)
        return list(dict.fromkeys(dataclasses.replace(each, pack_gqa=packs, split=False) for each in found))

    def cost(self, config: AttnFwdMmaConfig, op: Any, device: Device) -> float:
        plain, rows_each = dataclasses.replace(config, pack_gqa=False), op.heads_per_kv if config.pack_gqa else 1
        if isinstance(op, Forward):
            return ATTN_FWD_MMA.cost(plain, op, device)
        return ATTN_FWD_MMA.seconds(plain, over_tensors(op), device, rows_each)

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[Any, ...]:
        """Those of plain tensors, with as many heads for each key head."""
        if paging.has_functions(op):
            return (paging.tried_shape(op),)
        shapes = ATTN_FWD_MMA.tuning_shapes(over_tensors(op))
        return tuple(dataclasses.replace(each, heads=each.kv_heads * op.heads_per_kv) for each in shapes)

    def options(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> dict[str, Option]:
        """The option on each axis."""
        own: dict[str, Option] = {
            "Rows": rows.StridedCacheRows(op.ragged, paging.lengths_option(op)),
            "Kv": (kv.PagedRowsWidenedKv if paging.is_fp8(op) else kv.PagedRowsKv)(kv.PAGES[op.form]),
            "Scheduler": scheduler.ReportingScheduler(tiling.lpt_scheduler(over_tensors(op), persistent=False)),
            "Walk": tiling.cursor(over_tensors(op)),
        }
        return paging.options(op, config.pack_gqa, own)

    def fields(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> Fields:
        """The fields of struct Args, in order."""
        tensors = [Field("q", "StridedTensor", View("q"))]
        tensors += [Field(name, "StridedPages", PagePool(f"{name}_cache", 0)) for name in "kv"]
        return tuple(dict.fromkeys(tiling.fields(tensors, self.options(op, config))))

    def render(self, op: AttentionKVCache, config: AttnFwdMmaConfig, arch: str) -> Source:
        """The source of operations of one kind."""
        constants = ATTN_FWD_MMA.constants(over_tensors(op), config)
        return source(ATTN_FWD_MMA.file, config_header(constants, self.fields(op, config), [], self.options(op, config)), arch)

    def _tiled(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> Forward:
        """The forward that has as many tiles."""
        return packed_gqa(op) if config.pack_gqa else over_tensors(op)

    def values(self, op: AttentionKVCache, config: AttnFwdMmaConfig, device: Device) -> dict[str, float]:
        """The run-time numbers of struct Args."""
        found = tiling.values(self._tiled(op, config), config.tile_q, device) | paging.values(op)
        found |= {"scale": found["scale"] * op.k_scale, "v_scale": op.v_scale}
        return found | {"pack_gqa_heads": op.heads_per_kv if config.pack_gqa else 1}

    def lower(self, op: AttentionKVCache, config: AttnFwdMmaConfig, device: Device) -> Program:
        """The launch; none where no row is computed."""
        if not op.total_q * op.batch:
            return Program(())
        key = (over_tensors(op).kind, paging.arrays_of(op), op.kv_element, op.form, config, device.arch)
        rendered = self._kept(key, lambda: (self.render(op, config, device.arch), self.fields(op, config)))
        grid = tiling.most_tiles(self._tiled(op, config), config.tile_q)
        program = Program((Launch(self.name, *rendered, self.values(op, config, device), grid),))
        return pyramid.before(program, op.mask, device)


ATTN_FWD_MMA_KVCACHE = AttnFwdMmaKVCache()
