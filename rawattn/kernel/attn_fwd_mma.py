"""attn_fwd_mma.cu: many query rows on any GPU from Ampere on. What it can do, how it may be configured, and its launch."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..compiler import Source
from ..device import Device
from ..problem import Problem
from ..render import config_header, source
from ..tma import unaligned_reason
from ..variant import Fields, Option, element, kv, rows, softmax, store
from ..variant.mask import Both, Causal, Full, Window
from ..variant.score import Scale
from . import tiling
from .tiling import RESERVED_SMEM, kept_keys, tiles

name = "attn_fwd_mma"
file = "attn_fwd_mma.cu"
alignment = 16  # bytes, of the output's pointer and strides
tma_unsupported_reason = unaligned_reason


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes in rows; slots of the ring, which K and V tiles share; m_tiles_per_warp of 16 query rows that a warp computes; contraction
    steps of 16 columns whose Q stays in registers; blocks that share a multiprocessor."""

    tile_q: int = 128
    tile_kv: int = 64
    stages: int = 2
    m_tiles_per_warp: int = 2
    q_steps_in_registers: int = 0
    ctas_per_sm: int = 2

    @property
    def threads(self) -> int:
        return 2 * self.tile_q // self.m_tiles_per_warp


def runs_on(device: Device) -> bool:
    """Whether the device has the instructions."""
    return device.capability >= 80


def supports(problem: Problem, device: Device) -> str | None:
    """None if this kernel computes the problem on the device, else the reason why not."""
    if not runs_on(device):
        return f"it needs a GPU of compute capability 8.0 or newer, and {device.name} is {device.arch}"
    if problem.element not in (element.BF16, element.FP16):
        return f"it takes bf16 and fp16, not {problem.element.name}"
    for which in ("head_dim", "head_dim_v"):
        size = getattr(problem, which)
        if size % 8 or not 8 <= size <= 256:
            return f"{which} is {size}; it takes multiples of 8 from 8 to 256"
    if tiles(as_rows(problem), 32) >= 1 << 31:
        return f"{problem.total_q * problem.heads} query rows are more than a grid has blocks for"
    return problem.unaligned_reason


def packs(problem: Problem) -> bool:
    """Whether the queries of all heads that share a key head are the rows of a tile: where they are few, so that tiles of 64 rows
    of one head would be emptier by a tenth. Not for varlen, where sequences have as many queries as they like."""
    if problem.heads == problem.kv_heads or problem.varlen or not problem.q_len:
        return False
    alone, together = (n / (-(-n // 64) * 64) for n in (problem.q_len, problem.q_len * problem.heads_per_kv))
    return alone < 0.9 * together


def as_rows(problem: Problem) -> Problem:
    """The problem whose queries and heads are the rows of tiles and the works in a row."""
    if not packs(problem):
        return problem
    return dataclasses.replace(problem, q_len=problem.q_len * problem.heads_per_kv, heads=problem.kv_heads)


def columns(problem: Problem) -> tuple[int, int]:
    """Columns of a Q or K tile and of a V tile: whole steps of 16."""
    return -(-problem.head_dim // 16) * 16, -(-problem.head_dim_v // 16) * 16


def smem_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of a block: Q, the ring, and the work."""
    qk, v = columns(problem)
    return 2 * (config.tile_q * qk + config.stages * config.tile_kv * max(qk, v)) + 128


def registers(config: Config, problem: Problem) -> int:
    """Registers of a thread, about: S, O, what is kept of Q, and the rest, fitted to what ptxas uses."""
    plain = isinstance(problem.mask, (Full, Causal)) and isinstance(problem.score, Scale)
    rest = 52 if plain else 76
    if problem.head_dim % 16 or problem.head_dim_v % 16:
        rest += 8 * plain + 12 * (config.m_tiles_per_warp - 1)
    elif problem.varlen and config.m_tiles_per_warp == 2:
        rest += 12 * problem.constant_time if plain else 4
    return (
        config.m_tiles_per_warp * (config.tile_kv // 2 + problem.head_dim_v // 2 + 4 * max(1, config.q_steps_in_registers)) + rest
    )


def register_limit(config: Config, device: Device) -> int:
    """Registers that a thread may have, with as many blocks on a multiprocessor, less what ptxas wants for itself: found by
    compiling what is chosen with NVRTC 13.0 and 13.5."""
    wanted = (24, 32) if device.capability >= 100 else (20, 0)
    return min(255, 65536 // (config.threads * config.ctas_per_sm) // 8 * 8) - wanted[config.m_tiles_per_warp - 1]


def legal(config: Config, problem: Problem, device: Device) -> str | None:
    """None if the configuration can be compiled and run for the problem, else the reason why not."""
    if config.m_tiles_per_warp not in (1, 2) or config.tile_q % (32 * config.m_tiles_per_warp) or not 32 <= config.tile_q <= 256:
        return f"tile_q is {config.tile_q} and m_tiles_per_warp {config.m_tiles_per_warp}; they must be a multiple of 32 m_tiles_per_warp up to 256, and 1 or 2"
    if config.tile_kv % 16 or not 16 <= config.tile_kv <= 256:
        return f"tile_kv is {config.tile_kv}; it must be a multiple of 16 from 16 to 256"
    steps = columns(problem)[0] // 16
    if not 0 <= config.q_steps_in_registers <= steps:
        return f"q_steps_in_registers is {config.q_steps_in_registers}; it must be from 0 to {steps}, the steps of head_dim {problem.head_dim}"
    if config.stages < 2 or not 1 <= config.ctas_per_sm <= 16:
        return f"stages is {config.stages} and blocks {config.ctas_per_sm}; they must be at least 2, and from 1 to 16"
    per_block = smem_bytes(config, problem) + RESERVED_SMEM
    if per_block * config.ctas_per_sm > device.smem_bytes + RESERVED_SMEM:
        return f"{config.ctas_per_sm} blocks need {per_block * config.ctas_per_sm} bytes of shared memory; there are {device.smem_bytes}"
    if registers(config, problem) > (limit := register_limit(config, device)):
        return f"a thread needs about {registers(config, problem)} registers; above {limit} it spills"
    return None


def tuning_shapes(problem: Problem) -> tuple[Problem, ...]:
    """The problems by which configurations are compared, as for the others; a mask of one kind takes as many registers. Where
    heads share tiles: one query and many keys, of sequences that fill a GPU and of one, and some queries."""
    found = tiling.tuning_shapes(problem)
    if packs(problem):
        few = dataclasses.replace(found[0], kv_len=4096, heads=8 * problem.heads_per_kv, kv_heads=8)
        found = tuple(dataclasses.replace(few, batch=batch, q_len=q_len) for batch, q_len in ((64, 1), (1, 1), (16, 32)))
    if isinstance(problem.mask, (Full, Causal)):
        return found
    return tuple(dataclasses.replace(each, mask=Both(Causal(), Window())) for each in found)


def candidates(problem: Problem, device: Device) -> list[Config]:
    """Legal configurations worth comparing: as many blocks as fit, a ring of two, whose slots are known at compile time, and of Q
    in registers nothing, or as much as fits."""
    steps, found = columns(problem)[0] // 16, []
    for m_tiles_per_warp, tile_q in ((2, 128), (1, 64), (2, 64), (1, 128), (1, 32)):
        for tile_kv in (64, 32) if m_tiles_per_warp == 2 else (64, 32, 128):
            bare = [Config(tile_q, tile_kv, 2, m_tiles_per_warp, 0, blocks) for blocks in (4, 3, 2, 1)]
            fitting = [c for c in bare if legal(c, problem, device) is None][:1]
            for config in fitting:
                room = 1 + (register_limit(config, device) - registers(config, problem)) // (4 * m_tiles_per_warp)
                kept = min(steps, room // 2 * 2)
                found += [config, *([dataclasses.replace(config, q_steps_in_registers=kept)] if kept else [])]
    return found


# Clocks of a multiprocessor, fitted to timings on an H200 (perf/notes/attn_fwd_mma.md).
_CLOCK = 1.7e9  # per second, under load
_FLOPS = {80: 2048, 90: 2560, 100: 2560}  # of mma.sync in a clock; 1024 on the others
_EACH_STEP = 40.0  # that a block's step takes from the others: barriers, addresses
_STEP = 1000.0  # that it takes a lone block: latencies
_WORK = 4400.0  # of a block: its start, its first loads, and its store


def cost(config: Config, problem: Problem, device: Device) -> float:
    """Estimated seconds, to compare configurations: for every key tile of every block the clocks of the products and of the
    exponentials (16 a clock), or of shared memory (128 bytes a clock), or the latencies of a lone block, whichever are more."""
    qk, v = columns(problem)
    tile_q, keys, warps = config.tile_q, config.tile_kv, config.threads / 32
    products = 2 * tile_q * keys * (qk + v) / _FLOPS.get(device.capability, 1024)
    exponentials = tile_q * keys / 16
    reread = 1 - config.q_steps_in_registers / (qk // 16)
    read = (keys * (qk + v) * 2 * (warps + 1) + tile_q * qk * 2 * reread) / 128  # by each warp, and written
    problem = as_rows(problem)
    count = max(1, tiles(problem, tile_q)) / device.sm_count  # blocks of a multiprocessor, and of them at a time
    together = min(config.ctas_per_sm, max(1.0, count))
    busy = together * (_larger((products + exponentials) * _uneven(together * warps), read) + _EACH_STEP)
    alone = _larger((products + exponentials) * _uneven(warps), read) + _STEP
    begin, end = kept_keys(problem.mask, problem.q_len, problem.kv_len, tile_q)
    tiles_each = np.maximum(-(-end // keys) - begin // keys, 0).max(1)  # key tiles of each sampled query tile
    work = tiles_each * max(busy, alone) + _WORK
    waves = np.ceil(count / together) if work.max() < 1.05 * work.mean() else max(1.0, count / together + 0.3)
    return float(waves * work.mean()) / _CLOCK


def _uneven(warps: float) -> float:
    """How much longer the four schedulers take, each with its own tensor core, than if the warps were spread evenly."""
    return float(np.ceil(warps / 4) * 4 / warps)


def _larger(a: float, b: float) -> float:
    """What two things take that overlap, nearly."""
    return float((a**4 + b**4) ** 0.25)


def choices(problem: Problem) -> dict[str, Option]:
    """The choice on each axis, by the name that the kernel has for it."""
    out = store.StoreOLse() if problem.return_lse else store.StoreO()
    plan = tiling.lpt_scheduler(problem, persistent=False)
    own: dict[str, Option] = {"Softmax": softmax.SpeculativeMax(), "Kv": kv.CpAsyncKv(), "Scheduler": plan, "Store": out}
    if packs(problem):
        own |= {"Rows": rows.PackGqa(), "Mask": rows.PackGqaMask(problem.mask), "Score": rows.PackGqaScore(problem.score)}  # type: ignore[arg-type]
    return tiling.choices(problem, **own)


def fields(problem: Problem) -> Fields:
    """The fields of struct Args, in order."""
    return tiling.fields(choices(problem), "StridedTensor")


def render(problem: Problem, config: Config, arch: str) -> Source:
    """The source of one configuration; problems that differ in run-time values alone share it."""
    constants = {**dataclasses.asdict(config), "threads": config.threads}
    constants |= {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    constants["q_signs"] = -0x7FFF8000 if problem.scale < 0 else 0  # flips the signs of two numbers
    return source(file, config_header(constants, fields(problem), [], choices(problem)), arch)


def grid(problem: Problem, config: Config, device: Device) -> int:
    """Blocks: one for each query tile."""
    return tiles(as_rows(problem), config.tile_q)


def values(problem: Problem, config: Config, device: Device) -> dict[str, float]:
    """The fields of Args that follow from the problem alone."""
    found = tiling.values(as_rows(problem), config, device)
    return found | {"q_len": problem.q_len, "pack_gqa_heads": problem.heads_per_kv} if packs(problem) else found
