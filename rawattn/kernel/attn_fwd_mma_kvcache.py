"""attn_fwd_mma.cu over caches: attention of many queries over cached keys on any GPU from Ampere on."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache, Forward
from ..variant import Option, kv, rows, scheduler, store
from ..variant.element import FP32
from ..variant.field import Field, Fields, View
from ..variant.gradients import Blocks16
from ..variant.mask import SplitTilesMask
from . import combine, few_rows, paging, tiling
from .attn_decode import MOST_ROWS, ceil_div, most_rows, split_rule
from .attn_fwd_mma import ATTN_FWD_MMA, AttnFwdMmaConfig, strip_option, strip_warps
from .paging import LONGEST, OverCache, forward_of, over_tensors
from .program import Program
from .render import config_header, source


def count_splits(op: AttentionKVCache) -> int:
    """The splits of a sequence at most: as many as the bound of lengths may need. Its own length says how many it has."""
    keys, most = split_rule(op)
    return min(most, ceil_div(max(1, op.kv_len), keys))


def split_reason(op: AttentionKVCache) -> str | None:
    """The reason why keys cannot be split."""
    if strip_warps(over_tensors(op)) == 1 or not few_rows.may_split(over_tensors(op)):
        others = "functions, masks with holes, lists of keys, ragged steps, and invariant"
        return f"over caches keys are not split of heads up to 256, nor with {others}"
    return None


def is_asked(op: AttentionKVCache) -> bool:
    """Says whether the call asks for splits of wide heads' keys. Up to 256 columns attn_decode has splits, and this kernel serves
    what it refuses."""
    return op.split_keys > 0 and strip_warps(over_tensors(op)) > 1


def splits(op: AttentionKVCache) -> bool:
    """Says whether keys are split by default: where few rows are. Never by the batch."""
    return split_reason(op) is None and (is_asked(op) or most_rows(op) <= MOST_ROWS)


class AttnFwdMmaKVCache(OverCache):
    """The kernel. Heads that share a key head share tiles."""

    name, plain, widens = "attn_fwd_mma", ATTN_FWD_MMA, True
    config_type = AttnFwdMmaConfig

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = [*super().supports(op, device), *paging.reasons_of_eight_bits(op, device)]
        if is_asked(op) and (reason := split_reason(op)):
            reasons.append(f"splits of keys are asked for; {reason}")
        return [*reasons, "it takes bf16 and fp16, not fp32"] if op.element == FP32 else reasons

    def legal(self, config: AttnFwdMmaConfig, op: AttentionKVCache, device: Device) -> str | None:
        if config.split and (reason := split_reason(op)):
            return f"split is True; {reason}"
        if is_asked(op) and not config.split:
            return "split is False; the call asks for splits of keys"
        if config.pack_gqa and op.heads == op.kv_heads:
            return "pack_gqa is True; it needs several query heads for each key head"
        plain = dataclasses.replace(config, pack_gqa=False, split=False)
        return ATTN_FWD_MMA.legal(plain, self.tiled(op, config), device)

    def candidates(self, op: Any, device: Device) -> list[AttnFwdMmaConfig]:
        forward = forward_of(op)
        packs = forward.heads_per_kv > 1 and max(forward.q_len, forward.total_q) * forward.heads_per_kv < LONGEST
        configs, split = ATTN_FWD_MMA.candidates(forward, device), not isinstance(op, Forward) and splits(op)
        return list(dict.fromkeys(dataclasses.replace(config, pack_gqa=packs, split=split) for config in configs))

    def cost(self, config: AttnFwdMmaConfig, op: Any, device: Device) -> float:
        plain, rows_each = dataclasses.replace(config, pack_gqa=False, split=False), op.heads_per_kv if config.pack_gqa else 1
        if isinstance(op, Forward):
            return ATTN_FWD_MMA.cost(plain, op, device)
        return ATTN_FWD_MMA.seconds(plain, over_tensors(op), device, rows_each, paging.widening(op))

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[Any, ...]:
        """The tuning shapes of plain tensors, with as many heads for each key head as the operation has. Where keys are split it
        is one, of as many queries: the batch has no say in the tiles, nor have they in the bits."""
        if paging.has_functions(op):
            return (paging.tried_shape(op),)
        if splits(op):
            return (dataclasses.replace(op, batch=64, q_len=max(1, op.q_len), kv_len=4096, total_q=-1),)
        if paging.has_records(op):
            ragged = op.keys is None  # so that these are not split, nor is what they stand for
            return tuple(
                dataclasses.replace(op, batch=n, q_len=q_len, kv_len=4096, total_q=n * q_len if ragged else -1, ragged=ragged)
                for n, q_len in ((64, 1), (1, 1), (4, 512))
            )
        shapes = ATTN_FWD_MMA.tuning_shapes(over_tensors(op))
        return tuple(dataclasses.replace(shape, heads=shape.kv_heads * op.heads_per_kv) for shape in shapes)

    def packs(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> bool:
        return config.pack_gqa

    def options(self, op: AttentionKVCache, config: AttnFwdMmaConfig) -> dict[str, Option]:
        if not config.split:
            return super().options(op, config)
        options = super().options(dataclasses.replace(op, sinks=False), config)  # which join where the splits are folded
        order = scheduler.ReportingScheduler(scheduler.LptScheduler(persistent=False, split=True))
        return options | {"Mask": SplitTilesMask(options["Mask"]), "Scheduler": order, "Store": store.StorePartial()}

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

    def lower(self, op: AttentionKVCache, config: AttnFwdMmaConfig, device: Device) -> Program:
        """The launch, or where keys are split two, the second of which folds; also where the bound of lengths allows one
        split, so that no bit follows from the bound."""
        whole = super().lower(op, config, device)
        if not config.split:
            return whole
        tiles = ATTN_FWD_MMA.tiles(self.tiled(op, config), dataclasses.replace(config, pack_gqa=False), device)
        tiles = tiles._replace(rows_each=op.heads_per_kv if self.packs(op, config) else 1, splits=count_splits(op))
        rendered = self._keep(("fold", op.kind, device.arch), lambda: combine.source_and_fields(op, device.arch))
        values = {"split_tiles": ceil_div(split_rule(op)[0], config.tile_kv)}
        return combine.folded(whole, op, tiles, op.total_q * op.heads, rendered, values)

    def values(self, op: AttentionKVCache, config: AttnFwdMmaConfig, device: Device) -> dict[str, float]:
        values = super().values(op, config, device)
        return values | {"scale": values["scale"] * op.k_scale, "v_scale": op.v_scale}


ATTN_FWD_MMA_KVCACHE = AttnFwdMmaKVCache()
