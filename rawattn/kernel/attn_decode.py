"""attn_decode.cu: attention of few queries over cached keys, dense and paged, split by the sequence's own length."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache
from ..operation.operand import Layout
from ..variant import Option, element, kv, rows, scheduler, softmax, store, weight
from ..variant.field import Counter, Field, Fields, PagePool, Scratch, View, Violations
from ..variant.walk import SplitIntervalWalk, SplitListWalk, lists
from . import few_rows, paging, pyramid, tiling
from .base import Kernel
from .paging import LONGEST, WHOLE, page_shift
from .program import Buffer, Launch, Program
from .render import config_header, source

FILE = "attn_decode.cu"
MOST_ROWS = 256  # queries of the heads that share a key head; every 32 of them read the keys again
SPLIT_GROUP = 8  # tile/splits.cuh
MOST_SPLITS = 128  # for which there is room in the block's list
MOST_BLOCKS = 256  # that have a counter each
MOST_BYTES = 20_000_000  # of the states of splits, on a stream
_START = {1: 9e-6, 2: 14e-6}  # seconds, by m_tiles; fitted to timings on an H200 (perf/notes/attn_decode.md)


@dataclasses.dataclass(frozen=True)
class AttnDecodeConfig:
    """The configuration of attn_decode.cu."""

    m_tiles: int = 1  # of 16 rows, with four warps each
    tile_kv: int = 64
    stages: int = 5  # of the ring
    q_steps_in_registers: int = 8  # steps of the contraction whose Q stays in registers
    steps_at_once: int = 2  # steps of 32 keys whose scores are computed together
    merge_passes: int = 1  # by which warps exchange columns
    cp_async: bool = False  # whether warps copy the pages, in place of TMA
    producers: int = 1  # warps that copy; TMA needs one
    q_tiles: int = 2  # with two a producer loads Q of the next work ahead

    @property
    def tile_q(self) -> int:
        return 16 * self.m_tiles

    @property
    def warps(self) -> int:
        return self.producers + 4 * self.m_tiles


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def most_rows(op: AttentionKVCache) -> int:
    """Rows of a sequence at most: the queries of all heads that share a key head."""
    return op.q_len * op.heads_per_kv


def is_wide(op: AttentionKVCache) -> bool:
    """Says whether attn_decode_wide goes before attn_decode where it supports the operation: where keys would be read more than
    once, and with one or two key heads, whose folds are long, from 17 rows on. It never depends on the batch."""
    return most_rows(op) > (16 if op.kv_heads <= 2 else 32) and not op.split_keys


def is_crowded(op: AttentionKVCache) -> bool:
    """Says whether 32 rows of O take so many registers that a kernel for them may spill: in tiles of 64 keys, which caches of
    eight bits and ``invariant`` take, or where a step has all the arrays that it may have for each sequence."""
    return most_rows(op) > 16 and op.widest <= 192 and op.head_dim + op.head_dim_v > 256


def key_bytes(op: AttentionKVCache) -> int:
    """Bytes of a key and its value."""
    assert op.kv_element is not None
    return op.kv_element.itemsize * (op.head_dim + op.head_dim_v)


def smem_bytes(op: AttentionKVCache, config: AttnDecodeConfig) -> int:
    """Shared memory of a block, about."""
    blocks = ceil_div(op.head_dim_v, 32)
    ring = config.stages * config.tile_kv * key_bytes(op) + 24 * (config.stages + 3)
    exchange = 8192 * blocks // config.merge_passes + 2048 + 4096 * (blocks + 1)
    return ring + 2 * config.q_tiles * config.tile_q * op.head_dim + exchange * config.m_tiles + 1500


def page_rows(op: AttentionKVCache, config: AttnDecodeConfig) -> int:
    """Rows of a tile that lie in one page."""
    return config.tile_kv if config.cp_async or page_shift(op) == WHOLE else min(op.page_size, config.tile_kv)


def kv_option(op: AttentionKVCache, config: AttnDecodeConfig) -> Option:
    """The option for where keys and values come from."""
    pages, rows = kv.PAGES[op.form], page_rows(op, config)
    if config.cp_async:
        return kv.PagedCpAsyncKv(pages, rows)
    return (kv.SmallPagesTmaKv if paging.has_small_pages(op, config.tile_kv) else kv.PagedTmaKv)(pages, rows)


def must_copy(op: AttentionKVCache, device: Device) -> bool:
    """Says whether TMA cannot read the pages."""
    return device.capability < 90 or paging.has_tiny_pages(op) or op.layout.tma_unsupported is not None or op.pages == 0


def split_rule(op: AttentionKVCache) -> tuple[int, int]:
    """The fewest keys of a split and the most splits, powers of two: constants of the model, so that a row has the same bits in
    any batch. Sequences with few key heads are split more often."""
    most = 64 if op.kv_heads <= 2 else 32 if op.kv_heads <= 4 else 16
    return min(op.split_keys, LONGEST + 1) or 512, MOST_SPLITS if op.split_keys else most


def splits_at_most(op: AttentionKVCache) -> int:
    """The most splits of a sequence; the kernel cuts lengths to ``kv_len``."""
    keys, most = split_rule(op)
    return min(most, ceil_div(max(1, op.kv_len), 1 << keys.bit_length() - 1))


def _fill(op: AttentionKVCache, config: AttnDecodeConfig, room: int) -> AttnDecodeConfig:
    """The configuration with the fewest passes of the exchange that leave the ring four stages, and half of ``room`` or ten
    stages; where no number of passes does, with the one that leaves the ring the most stages."""
    tile, blocks = config.tile_kv * key_bytes(op), ceil_div(op.head_dim_v, 32)
    best = config
    for passes in (n for n in range(1, blocks + 1) if blocks % n == 0):
        tried = dataclasses.replace(config, merge_passes=passes)
        stages = min(10, (room - smem_bytes(op, tried)) // (tile + 24) + 1)
        if passes == 1 or stages > best.stages:
            best = dataclasses.replace(tried, stages=stages)
        if stages >= 4 and (stages == 10 or stages * tile >= room // 2):
            break
    return best


class AttnDecode(Kernel[AttentionKVCache]):
    """The kernel; its configuration follows from the sizes."""

    name = "attn_decode"
    needs = "a GPU of compute capability 8.0 or newer"
    config_type = AttnDecodeConfig

    def runs_on(self, device: Device) -> bool:
        return device.capability >= 80

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = [*self.device_reasons(device), *paging.reasons_of_pairs(op)]
        if op.element not in (element.BF16, element.FP16):
            reasons.append(f"it takes bf16 and fp16, not {op.element.name}")
        elif op.kv_element is not None and op.kv_element != op.element and not paging.is_fp8(op):
            reasons.append(f"it takes caches in the format of q, {op.element.name}, e4m3 and e5m2, not {op.kv_element.name}")
        reasons += paging.reasons_of_eight_bits(op, device)
        step = 32 if paging.is_fp8(op) else 16
        for which, size in (("head_dim", op.head_dim), ("head_dim_v", op.head_dim_v)):
            if size % step or not step <= size <= 256:
                over = " over caches of eight bits" if step == 32 else ""
                reasons.append(f"{which} is {size}; it takes multiples of {step} from {step} to 256{over}")
        if most_rows(op) > MOST_ROWS:
            heads = f"{op.q_len} queries of {op.heads_per_kv} heads for each key head"
            reasons.append(f"{heads} are {most_rows(op)} rows; it takes up to {MOST_ROWS}, and max_q_len says how many there are")
        if op.mask.of_head is not None:
            reasons.append("its mask differs by head, and it takes the keys of all heads of a sequence together")
        if not reasons and not self.candidates(op, device):
            sizes, room = f"head_dim {op.head_dim} and head_dim_v {op.head_dim_v}", f"{device.smem_bytes} bytes of {device.name}"
            reasons.append(f"{sizes} need more shared memory than the {room}")
        return reasons + tiling.reasons(self.layout_reason(op.layout))

    def prefers(self, op: AttentionKVCache, device: Device) -> bool:
        return not is_wide(op)

    def meant_for(self, op: AttentionKVCache, device: Device) -> bool:
        return self.runs_on(device) and most_rows(op) <= MOST_ROWS and op.mask.of_head is None

    def is_tried(self, op: AttentionKVCache) -> bool:
        return paging.has_functions(op) or is_crowded(op)

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.unaligned

    def legal(self, config: AttnDecodeConfig, op: AttentionKVCache, device: Device) -> str | None:
        if config.m_tiles not in (1, 2) or config.tile_kv not in (32, 64):
            tiles = f"m_tiles is {config.m_tiles} and tile_kv {config.tile_kv}"
            return f"{tiles}; they must be 1 or 2, and 32 or 64"
        if config.steps_at_once not in (1, config.tile_kv // 32):
            return f"steps_at_once is {config.steps_at_once}; it must be 1 or {config.tile_kv // 32}"
        blocks, steps = ceil_div(op.head_dim_v, 32), op.head_dim // 16
        if config.merge_passes < 1 or blocks % config.merge_passes:
            return f"merge_passes is {config.merge_passes}; it must divide {blocks}"
        if not 0 <= config.q_steps_in_registers <= steps:
            return f"q_steps_in_registers is {config.q_steps_in_registers}; it must be from 0 to {steps} here"
        if must_copy(op, device) and not config.cp_async:
            return "cp_async is False, but TMA cannot read these pages here"
        if config.producers not in ((1, 2, 4) if config.cp_async else (1,)):
            return f"producers is {config.producers}; it must be 1, or 2 or 4 where cp_async"
        if config.q_tiles not in (1, 2):
            return f"q_tiles is {config.q_tiles}; it must be 1 or 2"
        if config.stages < 2:
            return f"stages is {config.stages}; it must be at least 2"
        return tiling.too_much_smem(smem_bytes(op, config), 1, device)

    def candidates(self, op: AttentionKVCache, device: Device) -> list[AttnDecodeConfig]:
        """The configurations with as many stages as fit, up to ten, and two tiles of Q unless these leave fewer than four stages,
        or registers are few. Wide heads keep O in registers and Q in shared memory. For 32 rows, tiles of 32 keys are 8 % faster
        from 16 sequences on, where half of shared memory is on its way; at head_dim 64 they take up to 1.35 of the time."""
        dims, room, row_bytes, configs = op.head_dim + op.head_dim_v, device.smem_bytes, key_bytes(op), list[AttnDecodeConfig]()
        wide = op.widest > 192 or dims > 384
        for m_tiles in (2, 1) if most_rows(op) > 16 and not wide else (1,):
            fewer = wide or (m_tiles == 2 and dims > 128 and not op.spec.invariant)  # other tiles are other bits
            tile = 32 if (not paging.is_fp8(op) and fewer) or (room < 110_000 and row_bytes > 256) else 64
            most = 192 if op.kv_element == element.E5M2 else 256  # NVRTC 13.0 spills e5m2 beyond
            tight = wide or (m_tiles == 2 and (dims > most or must_copy(op, device)))
            kept = 0 if tight else max(0, op.head_dim // (16 * m_tiles) - (m_tiles == 2 and any(paging.arrays_of(op))))
            at_once, copies = 1 if m_tiles == 2 or wide or tile == 32 else 2, must_copy(op, device)
            config = AttnDecodeConfig(m_tiles, tile, 1, kept, at_once, 1, copies, 4 if copies else 1)
            counts = (1,) if m_tiles == 2 and is_crowded(op) else (2, 1)  # more may spill
            forms = (_fill(op, dataclasses.replace(config, q_tiles=n), room) for n in counts)
            config = max(forms, key=lambda form: min(form.stages, 4))
            if config.stages * tile >= 64 * m_tiles and self.legal(config, op, device) is None:
                configs += [config, *self._lighten(config, op)] if self.is_tried(op) else [config]
                if m_tiles == 1 or not is_crowded(op):
                    break
        return configs

    def _lighten(self, config: AttnDecodeConfig, op: AttentionKVCache) -> list[AttnDecodeConfig]:
        """Configurations with fewer registers, which functions may need, the fastest first."""
        configs = [dataclasses.replace(config, q_steps_in_registers=n) for n in range(config.q_steps_in_registers)[::-2]]
        configs = [dataclasses.replace(lighter, steps_at_once=1) for lighter in (config, *configs)]
        return [lighter for lighter in configs if lighter != config]

    def cost(self, config: AttnDecodeConfig, op: AttentionKVCache, device: Device) -> float:
        """Counts how often the keys are read, once for each tile of rows, besides the start and the fold; of all configurations
        alike, by the first: ``candidates`` has them in their order."""
        first = (self.candidates(op, device) or [config])[0]
        readings = ceil_div(max(1, most_rows(op)), first.tile_q)
        return _START[first.m_tiles] + readings * few_rows.read_seconds(op, op.kv_len)

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[AttentionKVCache, ...]:
        return (op,)

    def options(self, op: AttentionKVCache, config: AttnDecodeConfig, arch: str) -> dict[str, Option]:
        """The option on each axis."""
        sums: Option = softmax.WithSink(softmax.Plain()) if op.sinks else softmax.Plain()
        operand: Option = element.PlainQ()
        if paging.is_fp8(op):
            k_scale, v_scale = kv.scales(op.k_scales, op.v_scales)
            sums, operand = softmax.WithVScale(sums, v_scale), element.ScaledQ(k_scale)
        score = paging.score_option(op)
        assert op.kv_element is not None
        return {
            "Element": element.FP16 if paging.is_fp8(op) else op.element,
            "QElement": op.element,
            "KvElement": op.kv_element,
            "OElement": op.element,
            "QOperand": operand,
            "Rows": paging.rows_option(op, rows.CacheRows(op.ragged, paging.lengths_option(op))),
            "Mask": rows.PackGqaMask(paging.mask_option(op)),
            "Score": rows.PackGqaScore(score.constant_time),
            "Softmax": sums,
            "Weight": weight.Identity(),
            "Kv": kv_option(op, config),
            "Walk": SplitListWalk() if lists(op.mask) else SplitIntervalWalk(),
            "Scheduler": scheduler.StreamKScheduler(),
            "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
            "Launch": scheduler.launch_of(arch),
        }

    def fields(self, op: AttentionKVCache, config: AttnDecodeConfig, arch: str) -> Fields:
        """The fields of struct Args, in order."""
        pool, box_rows = ("StridedPages", 0) if config.cp_async else ("TmaPages", page_rows(op, config))
        common = (
            *(Field(name, pool, PagePool(f"{name}_cache", box_rows)) for name in "kv"),
            Field("q", "StridedTensor", View("q")),
            Field("partials", "float*", Scratch("partials")),
            Field("arrived", "u32*", Counter(4 * MOST_BLOCKS + 4)),
            Field("violations", "u32*", Violations()),
            Field("scale", "Number"),
            Field("heads", "i32"),
            Field("slots", "i32"),
        )
        of_options = (field for option in self.options(op, config, arch).values() for field in option.fields)
        return (*common, *dict.fromkeys(of_options))

    def render(self, op: AttentionKVCache, config: AttnDecodeConfig, arch: str) -> Source:
        """The source of operations of one kind."""
        constants = {**dataclasses.asdict(config), "tile_q": config.tile_q, "warps": config.warps, "threads": 32 * config.warps}
        constants["m_tiles_per_warp"] = 1
        del constants["cp_async"]
        constants |= {
            "head_dim": op.head_dim,
            "head_dim_v": op.head_dim_v,
            "most_pieces": MOST_SPLITS,
            "most_blocks": MOST_BLOCKS,
        }
        constants["q_signs"] = -0x7FFF8000 if op.scale < 0 else 0  # flips the signs of two numbers
        return source(FILE, config_header(constants, self.fields(op, config, arch), [], self.options(op, config, arch)), arch)

    def values(self, op: AttentionKVCache) -> dict[str, float]:
        """The run-time numbers of struct Args; ``heads`` are those of the cache."""
        values: dict[str, float] = {"scale": abs(op.scale), "heads": op.kv_heads, "pack_gqa_heads": op.heads_per_kv}
        values |= paging.values(op) | {"slots": slots(op), "k_scale": op.k_scale, "v_scale": op.v_scale}
        keys, most = split_rule(op)
        values |= {"split_keys_log2": keys.bit_length() - 1, "most_splits_log2": most.bit_length() - 1}
        return values | op.mask.values | op.score.values

    def grid(self, op: AttentionKVCache, config: AttnDecodeConfig, device: Device) -> int:
        """The number of blocks: one for each multiprocessor, or for each split that there may be; fewer where their states would
        take more than MOST_BYTES."""
        works = op.batch * op.kv_heads * ceil_div(max(1, most_rows(op)), config.tile_q)
        room = 1 + MOST_BYTES // (4 * slots(op) * state_floats(op, config))
        return min(device.sm_count, MOST_BLOCKS, works * splits_at_most(op), room)

    def lower(self, op: AttentionKVCache, config: AttnDecodeConfig, device: Device) -> Program:
        """The launch, and its scratch: states of splits whose work another block finishes. None where no row is computed."""
        if not op.total_q * op.batch:
            return Program(())
        arch, options = device.arch, (op.form, page_rows(op, config), op.ragged, op.sinks, op.scale < 0, op.spec.kind)
        formats = op.element, op.kv_element, op.k_scales, op.v_scales, *paging.arrays_of(op)
        key = (formats, op.head_dim, op.head_dim_v, *options, config, arch)
        rendered = self._keep(key, lambda: (self.render(op, config, arch), self.fields(op, config, arch)))
        grid = self.grid(op, config, device)
        partials = Buffer("partials", partials_bytes(op, config, grid))
        program = Program((Launch(self.name, *rendered, self.values(op), grid),), (partials,))
        return pyramid.before(program, op.mask, device)


def slots(op: AttentionKVCache) -> int:
    """States that two blocks may leave in global memory at the border between them: a part of a group, the rest of it split by
    split, and all groups but that one."""
    return SPLIT_GROUP - 1 + ceil_div(splits_at_most(op), SPLIT_GROUP)


def partials_bytes(op: AttentionKVCache, config: AttnDecodeConfig, grid: int) -> int:
    """Bytes of the states at all borders between blocks."""
    return 4 * max(1, grid - 1) * slots(op) * state_floats(op, config)


def state_floats(op: AttentionKVCache, config: AttnDecodeConfig) -> int:
    """Numbers of a state (tile/softmax_state.cuh)."""
    return (512 * ceil_div(op.head_dim_v, 32) + 32) * config.m_tiles


ATTN_DECODE = AttnDecode()
