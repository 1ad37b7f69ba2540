"""attn_fwd_mma.cu over caches: attention of many queries over cached keys on any GPU from Ampere on."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache, Forward
from ..variant import Option, kv, rows, scheduler
from ..variant.element import FP32
from ..variant.field import Field, Fields, View
from ..variant.gradients import Blocks16
from . import paging, tiling
from .attn_fwd_mma import ATTN_FWD_MMA, AttnFwdMmaConfig, strip_option
from .paging import LONGEST, OverCache, forward_of, over_tensors
from .render import config_header, source


class AttnFwdMmaKVCache(OverCache):
    """The kernel. Heads that share a key head share tiles."""

    name, plain, widens = "attn_fwd_mma", ATTN_FWD_MMA, True
    config_type = AttnFwdMmaConfig

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = [*super().supports(op, device), *paging.reasons_of_eight_bits(op, device)]
        return [*reasons, "it takes bf16 and fp16, not fp32"] if op.element == FP32 else reasons

    def legal(self, config: AttnFwdMmaConfig, op: AttentionKVCache, device: Device) -> str | None:
        if config.split:
            return "split is True; over caches keys are not split"
        if config.pack_gqa and op.heads == op.kv_heads:
            return "pack_gqa is True; it needs several query heads for each key head"
        return ATTN_FWD_MMA.legal(dataclasses.replace(config, pack_gqa=False), self.tiled(op, config), device)

    def candidates(self, op: Any, device: Device) -> list[AttnFwdMmaConfig]:
        forward = forward_of(op)
        packs = forward.heads_per_kv > 1 and max(forward.q_len, forward.total_q) * forward.heads_per_kv < LONGEST
        configs = ATTN_FWD_MMA.candidates(forward, device)
        return list(dict.fromkeys(dataclasses.replace(config, pack_gqa=packs, split=False) for config in configs))

    def cost(self, config: AttnFwdMmaConfig, op: Any, device: Device) -> float:
        plain, rows_each = dataclasses.replace(config, pack_gqa=False), op.heads_per_kv if config.pack_gqa else 1
        if isinstance(op, Forward):
            return ATTN_FWD_MMA.cost(plain, op, device)
        return ATTN_FWD_MMA.seconds(plain, over_tensors(op), device, rows_each, paging.widening(op))

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[Any, ...]:
        """The tuning shapes of plain tensors, with as many heads for each key head as the operation has."""
        if paging.has_functions(op):
            return (paging.tried_shape(op),)
        if paging.has_records(op):
            sizes = ((64, 1), (1, 1), (4, 512))
            return tuple(
                dataclasses.replace(op, batch=n, q_len=q_len, kv_len=4096, total_q=-1, ragged=False) for n, q_len in sizes
            )
        shapes = ATTN_FWD_MMA.tuning_shapes(over_tensors(op))
        return tuple(dataclasses.replace(shape, heads=shape.kv_heads * op.heads_per_kv) for shape in shapes)

    def packs(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> bool:
        return config.pack_gqa

    def kernel_options(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> dict[str, Option]:
        return {
            "Rows": rows.StridedCacheRows(op.ragged, paging.lengths_option(op)),
            **paging.strided_options(op, kv.PAGES[op.form]),
            "Scheduler": scheduler.ReportingScheduler(tiling.lpt_scheduler(over_tensors(op), persistent=False)),
            "Walk": tiling.cursor(over_tensors(op)),
            "Blocks": Blocks16(),
            "Strip": strip_option(over_tensors(op)),
        }

    def fields(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> Fields:
        tensors = [Field("q", "StridedTensor", View("q")), *paging.strided_pools(op)]
        return tuple(dict.fromkeys(tiling.fields(tensors, self.options(op, config))))

    def render(self, op: AttentionKVCache, config: AttnFwdMmaConfig, arch: str) -> Source:
        constants = ATTN_FWD_MMA.constants(over_tensors(op), config)
        options = paging.in_records(self.options(op, config), op, arch)
        return source(ATTN_FWD_MMA.file, config_header(constants, self.fields(op, config), [], options), arch)

    def grid(self, op: AttentionKVCache, config: AttnFwdMmaConfig, device: Device) -> int:
        return tiling.most_tiles(self.tiled(op, config), config.tile_q)

    def values(self, op: AttentionKVCache, config: AttnFwdMmaConfig, device: Device) -> dict[str, float]:
        values = super().values(op, config, device)
        return values | {"scale": values["scale"] * op.k_scale, "v_scale": op.v_scale}


ATTN_FWD_MMA_KVCACHE = AttnFwdMmaKVCache()
