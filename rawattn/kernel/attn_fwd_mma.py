"""attn_fwd_mma.cu: forward attention with many query rows on any GPU from Ampere on."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..operation.operand import Layout
from ..variant import Option, kv, rows, scheduler, softmax, store
from ..variant.element import BF16, FP16, FP32
from ..variant.field import Field, Fields, View
from ..variant.gradients import Blocks16, Blocks32
from ..variant.mask import And, Causal, Full, SplitMask, Window
from ..variant.score import Softcap
from ..variant.walk import lists
from . import combine, tiling
from .base import ForwardKernel
from .program import Program
from .render import config_header, source
from .tiling import kept_keys, tiles

# Clocks of a multiprocessor, fitted to timings on an H200 (perf/notes/attn_fwd_mma.md).
_CLOCK = 1.7e9  # per second, under load
_EACH_STEP = 40.0  # that a block's step takes from the others: barriers, addresses
_STEP = 1000.0  # that it takes a lone block: latencies
_WORK = 4400.0  # of a block: its start, its first loads, and its store
_FOLD = 3e-6  # seconds of the launch that folds splits


@dataclasses.dataclass(frozen=True)
class AttnFwdMmaConfig:
    """The configuration of attn_fwd_mma.cu."""

    tile_q: int = 128
    tile_kv: int = 64
    stages: int = 2  # slots of the ring, which K and V tiles share
    m_tiles_per_warp: int = 2  # tiles of 16 query rows that a warp computes
    q_steps_in_registers: int = 0  # contraction steps of 16 columns whose Q stays in registers
    ctas_per_sm: int = 2  # blocks that share a multiprocessor
    pack_gqa: bool = False  # whether the query heads that share a key head share tiles
    split: bool = False  # whether a sequence's keys may be split, where few queries would leave multiprocessors idle

    @property
    def threads(self) -> int:
        """The threads of a block whose warps have rows of their own."""
        return 2 * self.tile_q // self.m_tiles_per_warp


def strip_warps(op: Forward) -> int:
    """Warps that have the same rows: two where one has no registers for all columns of O."""
    return 1 if op.widest <= 256 else 2


def strip_option(op: Forward) -> Option:
    """The option for which warps have the same rows."""
    return scheduler.OneWarp() if strip_warps(op) == 1 else scheduler.TwoWarps()


def threads(config: AttnFwdMmaConfig, op: Forward) -> int:
    """The threads of a block."""
    return config.threads * strip_warps(op)


def warp_columns(columns: int, warps: int) -> int:
    """The most columns that one of the ``warps`` of a strip has: of two the first, half of them in whole groups of chunks that
    change places (variant/strip/two_warps.cuh)."""
    if warps == 1:
        return columns
    whole = -(-columns // 16) * 16
    group = next(n for n in (64, 32, 16) if whole % n == 0)
    return -(-whole // (2 * group)) * group


def packs(op: Forward) -> bool:
    """Says whether the queries of all heads that share a key head should be the rows of a tile: where they are few, so that tiles
    of 64 rows of one head would be emptier by a tenth. Not for varlen, where sequences have any number of queries."""
    if op.heads == op.kv_heads or op.varlen or any(op.lens) or not op.q_len:
        return False
    alone, together = (n / (-(-n // 64) * 64) for n in (op.q_len, op.q_len * op.heads_per_kv))
    return alone < 0.9 * together


def packed_gqa(op: Forward, config: AttnFwdMmaConfig) -> Forward:
    """The operation whose queries and heads are the rows of tiles."""
    return op.packed if config.pack_gqa else op


@functools.cache
def unsplit(config: AttnFwdMmaConfig) -> AttnFwdMmaConfig:
    """The configuration for sequences whose keys are not split."""
    return dataclasses.replace(config, split=False)


def columns(op: Forward) -> tuple[int, int]:
    """Columns of a Q or K tile and of a V tile: whole steps of 16."""
    return -(-op.head_dim // 16) * 16, -(-op.head_dim_v // 16) * 16


def smem_bytes(config: AttnFwdMmaConfig, op: Forward) -> int:
    """Shared memory of a block: Q, the ring, the work, and the dot products of warps that exchange them."""
    qk, v = columns(op)
    sums = 8 * config.tile_q * config.tile_kv * (strip_warps(op) - 1)
    return op.element.itemsize * (config.tile_q * qk + config.stages * config.tile_kv * max(qk, v)) + 128 + sums


def registers(config: AttnFwdMmaConfig, op: Forward) -> int:
    """Registers of a thread, about: S, O, what is kept of Q, and the rest, fitted to what ptxas uses."""
    if op.element == FP32:
        sums = config.tile_kv // 2 + op.head_dim_v // 2 + max(0, config.tile_kv - 64)  # longer tiles have more on their way
        return config.m_tiles_per_warp * (sums + 8 * config.q_steps_in_registers) + 136
    plain = isinstance(op.mask, (Full, Causal)) and op.has_plain_score
    rest = 52 if plain else 76
    if op.head_dim % 16 or op.head_dim_v % 16:
        rest += 8 * plain + 12 * (config.m_tiles_per_warp - 1)
    elif op.varlen and config.m_tiles_per_warp == 2:
        rest += 12 * op.spec.data_independent if plain else 4
    if op.spec.dropout:
        rest += 4 if config.m_tiles_per_warp == 1 and not plain else 8 * config.m_tiles_per_warp * (1 + 2 * config.pack_gqa)
    width = warp_columns(op.head_dim_v, strip_warps(op)) // 2
    return config.m_tiles_per_warp * (config.tile_kv // 2 + width + 4 * max(1, config.q_steps_in_registers)) + rest


def register_limit(config: AttnFwdMmaConfig, op: Forward, device: Device) -> int:
    """Registers that a thread may have where the configuration's blocks share a multiprocessor, less what ptxas wants for itself:
    found by compiling what is chosen with NVRTC 13.0 and 13.5."""
    wanted = (24, 32) if device.capability >= 100 else (20, 0)
    return min(255, 65536 // (threads(config, op) * config.ctas_per_sm) // 8 * 8) - wanted[config.m_tiles_per_warp - 1]


_PAIRS, _SINGLE = (64, 32), (64, 32, 128)  # keys of a tile where a warp computes two tiles of 16 rows, and one
FORMS = tuple((m, q, n) for m, q in ((2, 128), (1, 64), (2, 64), (1, 128), (1, 32)) for n in (_PAIRS if m == 2 else _SINGLE))

WIDE_FORMS = tuple((1, q, n) for q in (64, 48, 32, 16) for n in (64, 32, 16))  # the same where two warps have a tile
WIDEST_V = 512  # of which a warp has 256


def forms_of_fp32(op: Forward, device: Device) -> list[tuple[int, int, int]]:
    """The same of fp32, the fastest on an H200 first (perf/notes/attn_fwd_simt.md). A warp with two tiles has no registers left
    for more than a causal mask, and elsewhere it spills."""
    is_plain = isinstance(op.mask, (Full, Causal)) and op.has_plain_score and not op.sinks
    has_two = is_plain and device.capability == 90 and not tiling.is_few(op)
    return [*[(2, 128, 32)] * has_two, (1, 64, 64), (1, 64, 32)] if op.widest <= 64 else [(1, 64, 32)]


def _stretch(warps: float) -> float:
    """The factor by which the four schedulers, each with its own tensor core, take longer than with evenly spread warps."""
    return float(np.ceil(warps / 4) * 4 / warps)


def _overlap(a: float, b: float) -> float:
    """The time, about, that two overlapping things take which alone take ``a`` and ``b``."""
    return float((a**4 + b**4) ** 0.25)


def size_reasons(op: Forward) -> list[str]:
    """The reasons why the kernel does not take the head sizes or the number format."""
    reasons = tiling.tensor_core_reasons(op, 128 if op.element == FP32 else 576, (BF16, FP16, FP32))
    if op.element != FP32 and op.head_dim_v > WIDEST_V:
        reasons.append(f"head_dim_v is {op.head_dim_v}; it takes up to {WIDEST_V}")
    return reasons


class AttnFwdMma(ForwardKernel):
    """The kernel and its cost model."""

    name = "attn_fwd_mma"
    needs = "a GPU of compute capability 8.0 or newer"
    file = "attn_fwd_mma.cu"
    config_type = AttnFwdMmaConfig

    def runs_on(self, device: Device) -> bool:
        return device.capability >= 80

    def prefers(self, op: Forward, device: Device) -> bool:
        """Says whether it comes first: of fp32 where three products of tf32 take less time than one by FFMA, which are 256 FLOP a
        clock, and 128 of sm_80."""
        return op.element != FP32 or tiling.mma_flops(device) // 6 > 256 or device.capability == 80

    def asks_for_copies(self, op: Forward) -> bool:
        """Says no for fp32: attn_fwd_simt takes such arrays, as it did before."""
        return op.element != FP32

    def supports(self, op: Forward, device: Device) -> list[str]:
        reasons = self.device_reasons(device) + size_reasons(op)
        has_polynomial = isinstance(op.score, Softcap)  # which errs by 1e-6
        if op.element == FP32 and (op.spec.dropout or op.constant_time or has_polynomial):
            reasons.append("it takes fp32 without dropout, softcap and constant_time")
        reasons += tiling.too_many_tiles(op, 32) + tiling.function_reasons(op)
        return reasons + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.unaligned

    def legal(self, config: AttnFwdMmaConfig, op: Forward, device: Device) -> str | None:
        if config.m_tiles_per_warp not in (1, 2):
            return f"m_tiles_per_warp is {config.m_tiles_per_warp}; it must be 1 or 2"
        if strip_warps(op) == 2 and (config.m_tiles_per_warp != 1 or config.tile_q > 128):
            values = f"m_tiles_per_warp is {config.m_tiles_per_warp} and tile_q {config.tile_q}"
            return f"{values}; they must be 1 and up to 128 for heads wider than 256"
        rows = 32 * config.m_tiles_per_warp // strip_warps(op)
        if config.tile_q % rows or not rows <= config.tile_q <= 256:
            return f"tile_q is {config.tile_q}; it must be a multiple of {rows} up to 256"
        if config.pack_gqa and (op.varlen or any(op.lens) or op.heads == op.kv_heads):
            return "pack_gqa is True; it needs several query heads for each key head, and sequences of one length"
        if reasons := tiling.too_many_tiles(packed_gqa(op, config), config.tile_q):
            return reasons[0]
        if config.tile_kv % 16 or not 16 <= config.tile_kv <= 256:
            return f"tile_kv is {config.tile_kv}; it must be a multiple of 16 from 16 to 256"
        steps = warp_columns(columns(op)[0], strip_warps(op)) // 16
        if not 0 <= config.q_steps_in_registers <= steps:
            return f"q_steps_in_registers is {config.q_steps_in_registers}; it must be from 0 to {steps} here"
        if config.stages < 2 or not 1 <= config.ctas_per_sm <= 16:
            return f"stages is {config.stages} and ctas_per_sm {config.ctas_per_sm}; they must be at least 2, and from 1 to 16"
        if reason := tiling.too_much_smem(smem_bytes(config, op), config.ctas_per_sm, device):
            return reason
        if registers(config, op) > (limit := register_limit(config, op, device)):
            return f"a thread needs about {registers(config, op)} registers; above {limit} it spills"
        return None

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        """The operations by which configurations are compared, with a window where the mask has one: it takes registers. Where
        heads share tiles, these have one query and many keys, of sequences that fill a GPU and of one, and some queries."""
        shapes = tiling.tuning_shapes(op)
        if not op.invariant and (packs(op) or tiling.is_few(op)):
            few = dataclasses.replace(shapes[0], kv_len=4096, heads=8 * op.heads_per_kv, kv_heads=8)
            shapes = tuple(dataclasses.replace(few, batch=batch, q_len=q_len) for batch, q_len in ((64, 1), (1, 1), (16, 32)))
        if isinstance(op.mask, (Full, Causal)) or lists(op.mask):
            return shapes
        return tuple(tiling.with_mask(shape, And(Causal(), Window())) for shape in shapes)

    def candidates(self, op: Forward, device: Device) -> list[AttnFwdMmaConfig]:
        """The configurations with as many blocks as fit, a ring of two, whose slots are known at compile time, and of Q in
        registers nothing, or as much as fits; of fp32 one."""
        steps, configs, split = warp_columns(columns(op)[0], strip_warps(op)) // 16, [], tiling.is_few(op)
        is_fp32 = op.element == FP32
        forms = forms_of_fp32(op, device) if is_fp32 else FORMS if strip_warps(op) == 1 else WIDE_FORMS
        for m_tiles_per_warp, tile_q, tile_kv in forms:
            bare = [AttnFwdMmaConfig(tile_q, tile_kv, 2, m_tiles_per_warp, 0, ctas, packs(op), split) for ctas in (4, 3, 2, 1)]
            fitting = [c for c in bare if self.legal(c, op, device) is None][:1]
            for config in fitting:
                room = 1 + (register_limit(config, op, device) - registers(config, op)) // (4 * m_tiles_per_warp)
                kept = min(steps, room // 2 * 2)
                configs += [config, *([dataclasses.replace(config, q_steps_in_registers=kept)] if kept else [])]
        return configs[:1] if is_fp32 else configs

    def cost(self, config: AttnFwdMmaConfig, op: Forward, device: Device) -> float:
        return self.seconds(config, op, device)

    def seconds(self, config: AttnFwdMmaConfig, op: Forward, device: Device, rows_each: int = 1, widening: float = 0.0) -> float:
        """Counts for every key tile of every block the clocks of the products and of the exponentials (16 a clock), or of shared
        memory (128 bytes a clock), or the latencies of a lone block, whichever are more. Over caches ``rows_each`` heads share a
        tile, and ``widening`` are the clocks that threads need to make a key's numbers."""
        qk, v = columns(op)
        tile_q, keys, warps, strip = config.tile_q, config.tile_kv, threads(config, op) / 32, strip_warps(op)
        each, size = 6 if op.element == FP32 else 1, op.element.itemsize  # of tf32: three, at half the rate
        products = 2 * each * tile_q * keys * (qk + v) / tiling.mma_flops(device)
        exponentials = strip * tile_q * keys / 16
        reread = 1 - config.q_steps_in_registers / (warp_columns(qk, strip) // 16)
        exchanged = 16 * tile_q * keys * (strip - 1)
        moved = keys * (qk + v) * size * (warps / strip + 1) + tile_q * qk * size * reread  # by each warp, and written
        read = (moved + exchanged) / 128
        splits = tiling.splits(op, device)[0] if config.split else 1
        op = packed_gqa(op, config)
        count = max(1, tiles(op, tile_q, rows_each) * splits) / device.sm_count  # blocks of a multiprocessor
        together = min(config.ctas_per_sm, max(1.0, count))  # at a time
        widened = keys * widening  # by all warps, which wait for each other then
        busy = together * (_overlap((products + exponentials) * _stretch(together * warps), read) + _EACH_STEP + widened)
        alone = _overlap((products + exponentials) * _stretch(warps), read) + _STEP + widened
        begin, end = kept_keys(op.spec.placed_mask, op.q_len, op.kv_len, tile_q, rows_each)
        tiles_each = np.maximum(-(-end // keys) - begin // keys, 0).max(1)  # key tiles of each sampled query tile
        tiles_each = np.ceil(tiles_each / splits)
        work = tiles_each * max(busy, alone) + _WORK
        waves = np.ceil(count / together) if work.max() < 1.05 * work.mean() else max(1.0, count / together + 0.3)
        return float(waves * work.mean()) / _CLOCK + _FOLD * (splits > 1)

    def options(self, op: Forward, config: AttnFwdMmaConfig) -> dict[str, Option]:
        out = store.StoreOLse() if op.return_lse else store.StoreO()
        plan = tiling.lpt_scheduler(op, persistent=False)
        options: dict[str, Option] = {"Softmax": softmax.SpeculativeMax(), "Kv": kv.CpAsyncKv(), "Scheduler": plan, "Store": out}
        options |= {"Walk": tiling.cursor(op), "Blocks": Blocks32() if op.element == FP32 else Blocks16()}
        options |= {"Strip": strip_option(op), "Slots": kv.Turns(), "QColumns": rows.OneQ()}
        if config.pack_gqa:
            options |= tiling.packed_options(op, rows.PackGqa())
        if config.split:
            options |= {"Mask": SplitMask(options.get("Mask", op.mask)), "Store": store.StorePartial()}
            options["Scheduler"] = scheduler.LptScheduler(persistent=False, split=True)
            op = dataclasses.replace(op, sinks=False)  # which join where the splits are folded
        return tiling.options(op, **options)

    def fields(self, op: Forward, config: AttnFwdMmaConfig) -> Fields:
        return tiling.fields([Field(name, "StridedTensor", View(name)) for name in "qkv"], self.options(op, config))

    def constants(self, op: Forward, config: AttnFwdMmaConfig) -> dict[str, int]:
        """The constants of a configuration, in order."""
        constants = {**dataclasses.asdict(config), "threads": threads(config, op)}
        del constants["pack_gqa"], constants["split"]
        constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
        signs = -0x80000000 if op.element == FP32 else -0x7FFF8000
        constants["q_signs"] = signs if op.scale < 0 else 0  # flips the sign of a number, or of two
        return constants

    def render(self, op: Forward, config: AttnFwdMmaConfig, arch: str) -> Source:
        constants = self.constants(op, config)
        return source(self.file, config_header(constants, self.fields(op, config), [], self.options(op, config)), arch)

    def values(self, op: Forward, config: AttnFwdMmaConfig, device: Device) -> dict[str, float]:
        values = tiling.values(packed_gqa(op, config), config.tile_q, device)
        return values | {"q_len": op.q_len, "pack_gqa_heads": op.heads_per_kv} if config.pack_gqa else values

    def tiles(self, op: Forward, config: AttnFwdMmaConfig, device: Device) -> tiling.QueryTiles:
        query_tiles = super().tiles(packed_gqa(op, config), config, device)
        return query_tiles._replace(rows_each=op.heads_per_kv) if config.pack_gqa else query_tiles

    def lower(self, op: Forward, config: AttnFwdMmaConfig, device: Device) -> Program:
        splits, keys = tiling.splits(op, device) if config.split else (1, 0)
        if splits == 1 or self.grid(op, config, device) * splits > tiling.MOST_TILES:
            return super().lower(op, unsplit(config), device)
        return self._split(op, config, device, splits, keys)

    def _split(self, op: Forward, config: AttnFwdMmaConfig, device: Device, splits: int, keys: int) -> Program:
        """The program of two launches: each row's results over ``splits`` splits of ``keys`` keys, and their fold."""
        whole, rows = super().lower(op, config, device), op.batch * op.heads * op.q_len
        tiles = self.tiles(op, config, device)._replace(splits=splits)
        rendered = self._keep((op.kind, device.arch), lambda: combine.source_and_fields(op, device.arch))
        return combine.folded(whole, op, tiles, rows, rendered, {"split_keys": keys})

    def programs(self, op: Forward, config: AttnFwdMmaConfig, device: Device) -> tuple[Program, ...]:
        whole = super().lower(op, unsplit(config), device)
        return (whole, self._split(op, config, device, 2, tiling.SPLIT_KEYS)) if config.split else (whole,)


ATTN_FWD_MMA = AttnFwdMma()
