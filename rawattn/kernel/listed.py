"""attn_fwd_mma.cu and attn_fwd_simt.cu over lists of keys, in plain tensors and caches: each block of queries is a sequence of
its own, whose keys are those of its list."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache, Forward
from ..operation.kvcache import elements_text
from ..operation.operand import Layout
from ..variant import Option, constant_time, kv, rows, scheduler, softmax, store, weight
from ..variant.element import BF16, E4M3, FP16
from ..variant.field import Field, Fields, PagePool, View
from ..variant.gradients import Blocks16
from ..variant.lists import BlockLists, ListedMask, ListedPages, ListedRows, ListedScore, PackedKeys, PhysicalPages, TokenLists
from ..variant.mask import And, Causal, Full, Window
from ..variant.score import Scale, Softcap
from ..variant.walk import IntervalCursor
from . import intervals, paging, tiling
from .attn_fwd_mma import ATTN_FWD_MMA, AttnFwdMmaConfig, strip_option
from .attn_fwd_simt import ATTN_FWD_SIMT, AttnFwdSimtConfig
from .base import OneLaunch
from .program import Program
from .render import config_header, source

MOST_BLOCKS = 4096  # of queries, by which configurations are compared


def is_ragged(op: Any) -> bool:
    """Says whether sequences have any number of queries."""
    return bool(op.varlen if isinstance(op, Forward) else op.ragged)


def heads_each(op: Any) -> int:
    """The heads of q that share a list, and so the rows of a block for each of its queries."""
    return int(op.heads_per_kv) if op.keys.heads in (0, op.kv_heads) else 1


def count_blocks(op: Any) -> int:
    """The blocks of queries of all sequences, or the rows of q where each has a list."""
    return int(op.total_q if op.spec.keys.by_token else op.batch * op.keys.blocks)


def rows_each(op: Any) -> int:
    """The rows of a block."""
    return min(op.spec.keys.block_q, max(1, op.q_len)) * heads_each(op)


@functools.lru_cache(maxsize=1024)
def over_blocks(op: Any, masked: bool = False) -> Forward:
    """The forward over plain tensors whose sequences are blocks of queries and their keys, up to ``MOST_BLOCKS`` of them; if
    ``masked``, with a mask that takes about as many registers as lists do."""
    spec = dataclasses.replace(op.spec, keys=None, mask=And(Causal(), Window()) if masked else Full())
    heads, kv_len = op.heads // heads_each(op), op.keys.most * op.spec.keys.block_kv
    sizes = max(1, min(count_blocks(op), MOST_BLOCKS)), rows_each(op), kv_len, heads, heads, op.head_dim, op.head_dim_v
    return Forward(op.element, *sizes, spec, sinks=op.sinks, layout=op.layout)


def numbers_of(op: Any) -> TokenLists:
    """The option that says where the numbers of lists are."""
    return (TokenLists if op.spec.keys.by_token else BlockLists)(op.keys.counts)


def list_options(op: Any, of_rows: Option, mask: Option, score: Option) -> dict[str, Option]:
    """The options for rows, masks and scores of blocks, made of those of the real sequences."""
    lists, numbers = op.spec.keys, numbers_of(op)
    return {
        "Rows": ListedRows(of_rows, lists.block_q, lists.block_kv, is_ragged(op), lists.by_token),
        "Mask": ListedMask(mask, numbers),
        "Score": score if isinstance(op.score, (Scale, Softcap)) else ListedScore(score, numbers),
    }


def options(op: Any, **kernel_options: Option) -> dict[str, Option]:
    """The option on each axis; ``kernel_options`` are for one kernel alone."""
    sums = kernel_options.pop("Softmax")
    if isinstance(op, Forward):
        plain = tiling.options(op, Softmax=sums)
        own = list_options(op, plain["Rows"], plain["Mask"], op.score)
    else:
        of_rows = paging.rows_option(op, rows.StridedCacheRows(op.ragged, paging.lengths_option(op)))
        own = list_options(op, of_rows, paging.mask_option(op), paging.score_option(op))
    sums = softmax.WithSink(sums) if op.sinks else sums
    is_fp8 = not isinstance(op, Forward) and paging.is_fp8(op)
    by_axis: dict[str, Option] = {
        "Element": op.element,
        "KvElement": op.element if isinstance(op, Forward) else E4M3 if paging.has_records(op) else op.kv_element,
        **own,
        "Weight": weight.Identity(),
        "Softmax": softmax.WithVScale(sums, kv.CacheScale("v_scale")) if is_fp8 else sums,
        "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        "Walk": IntervalCursor(),
        "Scheduler": scheduler.LptScheduler(persistent=False),
        **kernel_options,
    }
    return constant_time(by_axis) if op.spec.data_independent else by_axis


def pages_option(op: Any) -> Option:
    """The option that says in which pages listed keys lie: those of a cache, or all keys of a sequence as one page."""
    pages: Option = PackedKeys() if is_ragged(op) else kv.OnePage()
    if not isinstance(op, Forward):
        pages = PhysicalPages(op.page_size) if op.spec.keys.physical else kv.PAGES[op.form]
    return ListedPages(pages, numbers_of(op))


def over_block_lists(op: AttentionKVCache) -> AttentionKVCache:
    """The step whose sequences are blocks of queries and their keys, in pages that TMA cannot read."""
    spec, heads = dataclasses.replace(op.spec, keys=None, mask=Full()), op.heads // heads_each(op)
    kv_heads = op.kv_heads if heads_each(op) > 1 else heads
    sizes = count_blocks(op), min(op.spec.keys.block_q, max(1, op.q_len)), op.keys.most * op.spec.keys.block_kv  # type: ignore[union-attr]
    cleared: dict[str, Any] = {
        "form": "table",
        "table": 1,
        "ragged": False,
        "total_q": -1,
        "kv_begin": False,
        "causal_each": False,
    }
    cleared |= {"keys": None, "spec": spec, "pages": 0, "page_size": 1, "heads": op.heads, "kv_heads": kv_heads}
    return dataclasses.replace(op, batch=sizes[0], q_len=sizes[1], kv_len=sizes[2], **cleared)


def values(op: Any) -> dict[str, float]:
    """The run-time numbers of struct Args, but for those of tiles."""
    numbers: dict[str, float] = {"scale": abs(op.scale), **op.spec.values, "q_len": op.q_len}
    numbers |= {"total_q": op.total_q} | ({"total_kv": op.total_kv} if isinstance(op, Forward) else paging.values(op))
    heads = heads_each(op)
    numbers |= {"heads": op.heads // heads, "heads_per_kv": op.heads_per_kv // heads, "pack_gqa_heads": 1}
    lists = {"listed_heads": heads, "listed": op.keys.most, "listed_sequences": op.batch}
    blocks = op.q_len if op.spec.keys.by_token else op.keys.blocks
    return numbers | lists | {"listed_blocks": max(1, blocks), "batches": count_blocks(op)}


def block_tiles(op: Any, tile_q: int, device: Device) -> tiling.QueryTiles:
    """The tiles of all blocks: those of the heads of a block are taken together."""
    heads = op.heads // heads_each(op)
    return tiling.QueryTiles(tile_q, 1, heads * count_blocks(op), device.sm_count, heads, 0, 0)


class Listed(OneLaunch[Any]):
    """A kernel over lists, in the configurations of ``plain``, the kernel over plain tensors."""

    plain: ClassVar[Any]

    def runs_on(self, device: Device) -> bool:
        return bool(self.plain.runs_on(device))

    def supports(self, op: Any, device: Device) -> list[str]:
        reasons: list[str] = self.plain.supports(over_blocks(op), device)
        if isinstance(op, Forward):
            reasons += tiling.function_reasons(op)
        tiles = -(-rows_each(op) // 16) * (op.heads // heads_each(op)) * count_blocks(op)
        if tiles > tiling.MOST_TILES:
            reasons.append(f"it counts up to {tiling.MOST_TILES} tiles of 16 rows, and here are {tiles}")
        if not isinstance(op, Forward) and op.split_keys:
            reasons.append(f"split is {op.split_keys}; it does not split keys")
        return reasons

    def layout_reason(self, layout: Layout) -> str | None:
        reason: str | None = self.plain.layout_reason(layout)
        return reason

    def cost(self, config: Any, op: Any, device: Device) -> float:
        return float(self.plain.cost(config, over_blocks(op), device))

    def tuning_shapes(self, op: Any) -> tuple[Any, ...]:
        """The operation on about as many blocks as fill a GPU, with 2048 keys each, so that no length compiles anything."""
        lists, is_forward = op.spec.keys, isinstance(op, Forward)
        q_len = 512 if lists.by_token else max(512, lists.block_q)
        sizes: dict[str, Any] = {"batch": 4, "q_len": q_len, "kv_len": 4096, "heads": 8 * op.heads_per_kv, "kv_heads": 8}
        sizes |= {"total_q": 4 * q_len, **({"total_kv": 4 * 4096} if is_forward else {})}
        heads = 0 if lists.by_token else 8 if op.keys.heads in (0, op.kv_heads) else sizes["heads"]
        blocks = 0 if lists.by_token else -(-q_len // lists.block_q)
        keys = op.keys._replace(most=max(1, 2048 // lists.block_kv), heads=heads, blocks=blocks)
        return (dataclasses.replace(op, **sizes, keys=keys),)

    def is_tried(self, op: Any) -> bool:
        return bool(self.plain.is_tried(over_blocks(op)) or op.mask.is_function)

    def rendered_kind(self, op: Any, config: Any) -> tuple[Any, ...]:
        return (op.kind,)

    def fields(self, op: Any, config: Any) -> Fields:
        plain = [Field(x, "StridedPages", PagePool(x, 0)) for x in "kv"]
        tensors = [Field("q", "StridedTensor", View("q")), *(plain if isinstance(op, Forward) else paging.strided_pools(op))]
        return tuple(dict.fromkeys(tiling.fields(tensors, self.options(op, config))))

    def grid(self, op: Any, config: Any, device: Device) -> int:
        return block_tiles(op, config.tile_q, device).at(rows_each(op))[1]

    def values(self, op: Any, config: Any, device: Device) -> dict[str, float]:
        return {**block_tiles(op, config.tile_q, device).at(rows_each(op))[0], **values(op)}

    def lower(self, op: Any, config: Any, device: Device) -> Program:
        whole = super().lower(op, config, device)
        return intervals.of_forward(whole, op, device) if isinstance(op, Forward) else whole


class AttnFwdMmaListed(Listed):
    """The kernel with tensor cores."""

    name, plain = "attn_fwd_mma", ATTN_FWD_MMA
    needs = ATTN_FWD_MMA.needs
    config_type = AttnFwdMmaConfig

    def supports(self, op: Any, device: Device) -> list[str]:
        reasons = super().supports(op, device)
        if op.element not in (BF16, FP16):
            reasons.append(f"it takes lists with bf16 and fp16, not {op.element.name}")
        if isinstance(op, AttentionKVCache):
            reasons += [*paging.reasons_of_tiles(op, True), *paging.reasons_of_eight_bits(op, device)]
        return list(dict.fromkeys(reasons))

    def meant_for(self, op: Any, device: Device) -> bool:
        return self.runs_on(device) and op.element in (BF16, FP16)

    def cost(self, config: AttnFwdMmaConfig, op: Any, device: Device) -> float:
        return ATTN_FWD_MMA.seconds(config, over_blocks(op), device, widening=paging.widening(op))

    def legal(self, config: AttnFwdMmaConfig, op: Any, device: Device) -> str | None:
        if config.pack_gqa or config.split:
            return "pack_gqa or split is True; over lists heads that share them share tiles, and keys are not split"
        if config.m_tiles_per_warp == 2 and config.tile_kv > 32:
            return f"m_tiles_per_warp is 2 and tile_kv {config.tile_kv}; over lists it spills"  # found by compiling
        reason: str | None = ATTN_FWD_MMA.legal(config, over_blocks(op, masked=True), device)
        return reason

    def candidates(self, op: Any, device: Device) -> list[AttnFwdMmaConfig]:
        """Those over plain tensors, with less of Q in registers, of which lists take some 32, and with tiles that a block's rows
        do not leave half empty, where there are such."""
        configs = []
        for config in ATTN_FWD_MMA.candidates(over_blocks(op, masked=True), device):
            kept = max(0, config.q_steps_in_registers - 8 // config.m_tiles_per_warp)
            configs.append(dataclasses.replace(config, pack_gqa=False, split=False, q_steps_in_registers=kept))
        configs = [config for config in dict.fromkeys(configs) if self.legal(config, op, device) is None]
        fitting = [config for config in configs if config.tile_q < 2 * max(32, rows_each(op))]
        return fitting or configs

    def options(self, op: Any, config: AttnFwdMmaConfig) -> dict[str, Option]:
        plain: dict[str, Option] = {"Kv": kv.PagedRowsKv(pages_option(op)), "Slots": kv.Turns(), "QColumns": rows.OneQ()}
        copies = paging.strided_options(op, pages_option(op)) if isinstance(op, AttentionKVCache) else plain
        strip = strip_option(over_blocks(op))
        return options(op, Softmax=softmax.SpeculativeMax(), Blocks=Blocks16(), Strip=strip, **copies)

    def render(self, op: Any, config: AttnFwdMmaConfig, arch: str) -> Source:
        constants = ATTN_FWD_MMA.constants(over_blocks(op), config)
        options = paging.in_records(self.options(op, config), op, arch)
        return source(ATTN_FWD_MMA.file, config_header(constants, self.fields(op, config), [], options), arch)

    def values(self, op: Any, config: AttnFwdMmaConfig, device: Device) -> dict[str, float]:
        numbers = super().values(op, config, device)
        if isinstance(op, AttentionKVCache):
            numbers |= {"scale": numbers["scale"] * op.k_scale, "v_scale": op.v_scale}
        return numbers


class AttnFwdSimtListed(Listed):
    """The kernel without tensor cores, for what is left."""

    name, plain, alignment = "attn_fwd_simt", ATTN_FWD_SIMT, 1
    needs = ATTN_FWD_SIMT.needs
    config_type = AttnFwdSimtConfig

    def supports(self, op: Any, device: Device) -> list[str]:
        reasons = super().supports(op, device)
        if isinstance(op, AttentionKVCache) and op.kv_element != op.element:
            reasons.append(f"it takes lists over caches in the format of q: {elements_text(op)}")
        return reasons

    def legal(self, config: AttnFwdSimtConfig, op: Any, device: Device) -> str | None:
        reason: str | None = ATTN_FWD_SIMT.legal(config, over_blocks(op), device)
        return reason

    def candidates(self, op: Any, device: Device) -> list[AttnFwdSimtConfig]:
        return list(ATTN_FWD_SIMT.candidates(over_blocks(op), device))

    def options(self, op: Any, config: AttnFwdSimtConfig) -> dict[str, Option]:
        return options(op, Softmax=softmax.Plain(), Kv=kv.PagedNumbersKv(pages_option(op)))

    def render(self, op: Any, config: AttnFwdSimtConfig, arch: str) -> Source:
        constants = ATTN_FWD_SIMT.constants(op, config)
        header = config_header(constants, self.fields(op, config), [], self.options(op, config))
        return source(ATTN_FWD_SIMT.file, header, arch)


ATTN_FWD_MMA_LISTED, ATTN_FWD_SIMT_LISTED = AttnFwdMmaListed(), AttnFwdSimtListed()
