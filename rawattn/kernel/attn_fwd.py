"""attn_fwd.cu: many query rows on Hopper. What it can do, how it may be configured, and what it is launched with."""

from __future__ import annotations

import dataclasses
import heapq

import numpy as np
import numpy.typing as npt

from ..compiler import Source
from ..device import Device
from ..problem import Problem
from ..render import config_header, source, wgmma
from ..tma import tma_unsupported_reason as tma_unsupported_reason
from ..variant import Fields, Option, element, kv, order, softmax, store
from ..variant.mask import Full
from ..variant.score import Scale
from . import tiling
from .tiling import kept_keys, tiles
from .tiling import tuning_shapes as tuning_shapes
from .tiling import values as values

name = "attn_fwd"
file = "attn_fwd.cu"
arch = "sm_90a"
alignment = 16  # bytes, of the output's pointer and strides


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes in rows, stages of the K and V rings and of Q; registers follow from the number of consumer warpgroups."""

    tile_q: int = 128
    tile_kv: int = 128
    stages: int = 2
    q_stages: int = 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, 64 query rows each."""
        return self.tile_q // 64

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer thread and of a consumer thread. A block has 65,536 in all; each warpgroup starts with an equal
        part of them (multiples of 8), and what the producer gives up the consumers take."""
        return {1: (56, 256), 2: (40, 232), 3: (32, 160) if self.tile_kv > 112 else (40, 152), 4: (32, 112)}[self.consumers]


def runs_on(device: Device) -> bool:
    """Whether the device has the instructions."""
    return device.arch == arch


def supports(problem: Problem, device: Device) -> str | None:
    """None if this kernel computes the problem on the device, else the reason why not."""
    if not runs_on(device):
        return f"it needs a Hopper GPU (compute capability 9.0), and {device.name} is {device.arch}"
    if problem.element not in (element.BF16, element.FP16):
        return f"it takes bf16 and fp16, not {problem.element.name}"
    for which in ("head_dim", "head_dim_v"):
        size = getattr(problem, which)
        if size % 8 or not 8 <= size <= 256:
            return f"{which} is {size}; it takes multiples of 8 from 8 to 256"
    if problem.total_q * problem.heads >= 1 << 37:
        return f"{problem.total_q * problem.heads} query rows are more than it can count tiles for"
    return problem.tma_unsupported_reason


def panels(columns: int) -> int:
    """Panels of 64 columns that a tile row takes in shared memory."""
    return -(-columns // 64)


def smem_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of a block, at most: tiles, barriers (8 bytes each) and two works."""
    q = config.q_stages * config.tile_q * panels(problem.head_dim)
    kv_rows = config.stages * config.tile_kv
    tiles = 128 * (q + kv_rows * (panels(problem.head_dim) + panels(problem.head_dim_v)))
    barriers = 8 * (2 * config.q_stages + 4 * config.stages + 4) + 24
    return -(-(tiles + barriers) // 1024) * 1024


def accumulators(config: Config, problem: Problem) -> int:
    """Registers of a consumer thread that hold S, P and O, and what a score works with besides."""
    tight = config.tile_kv > 64 if config.consumers == 3 else config.consumers == 4 and problem.varlen  # found by trying
    score = 13 if tight and not isinstance(problem.score, Scale) else 0
    return config.tile_kv // 2 + config.tile_kv // 4 + problem.head_dim_v // 2 + score


def legal(config: Config, problem: Problem, device: Device) -> str | None:
    """None if the configuration can be compiled and run for the problem, else the reason why not."""
    if config.tile_q not in (64, 128, 192, 256):
        return f"tile_q is {config.tile_q}; it must be 64, 128, 192 or 256"
    if config.tile_kv % 16 or not 32 <= config.tile_kv <= 256:
        return f"tile_kv is {config.tile_kv}; it must be a multiple of 16 from 32 to 256"
    if config.stages < 2 or config.q_stages not in (1, 2):
        return f"stages is {config.stages} and q_stages {config.q_stages}; they must be at least 2, and 1 or 2"
    if smem_bytes(config, problem) > device.smem_bytes:
        return f"it needs {smem_bytes(config, problem)} bytes of shared memory; a block has {device.smem_bytes}"
    if config.consumers == 3 and config.tile_kv > 128:
        return f"tile_kv is {config.tile_kv}; with three consumer warpgroups it spills above 128"
    limit = {256: 208, 232: 200, 160: 128, 152: 120, 112: 80}[config.registers[1]]
    if accumulators(config, problem) > limit:
        return f"its accumulators take {accumulators(config, problem)} registers of a thread; above {limit} it spills"
    return None


def candidates(problem: Problem, device: Device) -> list[Config]:
    """The legal configurations worth a thought: the deepest rings that fit, key tiles of 64 to 128 rows where
    there are any (longer ones lost wherever they were tried)."""
    found = []
    for tile_q in (64, 128, 192, 256):
        for tile_kv in range(32, 129, 16):
            for q_stages in (2, 1):
                fitting = [Config(tile_q, tile_kv, stages, q_stages) for stages in (8, 6, 5, 4, 3, 2)]
                found += [c for c in fitting if legal(c, problem, device) is None][:1]
    return [c for c in found if c.tile_kv >= 64] or found


# Clocks of a multiprocessor, fitted to timings on an H200 (perf/notes/attn_fwd.md).
_CLOCK = 1.755e9  # per second
_LAUNCH = 1.9e-6  # seconds
_OVERLAP = {1: 9.0, 2: 1.3, 3: 1.62, 4: 1.85}  # of products and exponentials, by warpgroups: 1 is none, infinity complete
_STEP = 30.0  # what else a step of one takes from the others
_ALONE, _ALONE_PER_KEY = 150.0, 3.7  # what a step takes one warpgroup besides its products, whatever the others do
_WORK, _WORK_PER_COLUMN = 2660.0, 7.75  # first and last step of a query tile, and its store


def cost(config: Config, problem: Problem, device: Device) -> float:
    """Estimated seconds, to compare configurations: for every query tile the clocks of its steps over key tiles, at the rate of
    the tensor cores (4096 FLOP a clock) and the exponentials (16 a clock), and what a tile costs besides."""
    columns = -(-problem.head_dim // 16) * 16 + problem.head_dim_v
    products, exponentials = 64 * config.tile_kv * columns / 2048, 4 * config.tile_kv  # of 64 rows by one key tile
    overlap = _OVERLAP[config.consumers]
    strip = (products**overlap + exponentials**overlap) ** (1 / overlap) + _STEP
    alone = products + _ALONE_PER_KEY * config.tile_kv + _ALONE
    begin, end = kept_keys(problem.mask, problem.q_len, problem.kv_len, config.tile_q)
    strips = np.maximum(-(-end // config.tile_kv) - begin // config.tile_kv, 0)  # key tiles
    work = np.maximum(strips.sum(1) * strip, strips.max(1) * alone) + _WORK + _WORK_PER_COLUMN * problem.head_dim_v
    return makespan(work, tiles(problem, config.tile_q), device.sm_count) / _CLOCK + _LAUNCH


def makespan(work: npt.NDArray[np.float64], count: int, workers: int) -> float:
    """When the workers are through with ``count`` works, taken one by one, the longest first; ``work`` samples their times."""
    if count > 8 * workers:
        return float(work.mean()) * (count / workers + 0.5)
    busy = [0.0] * workers
    for each in np.sort(np.resize(work, count))[::-1]:
        heapq.heapreplace(busy, busy[0] + float(each))
    return max(busy)


def choices(problem: Problem) -> dict[str, Option]:
    """The choice on each axis, by the name that the kernel has for it."""
    out = store.StoreOLse() if problem.return_lse else store.StoreO()
    plan = tiling.lpt_scheduler(problem, persistent=True)
    return tiling.choices(problem, Softmax=softmax.SpeculativeMax(), Kv=kv.TmaKv(), Scheduler=plan, Store=out)


def order_of(problem: Problem, config: Config) -> Option:
    """The order of the warpgroups' products: the one choice that depends on the configuration. Two take turns, but at head_dim
    256, where the products of one leave the other's softmax time enough; four do where none of them has tiles to skip, nor a
    softmax so long that it misses its turn (perf/notes/attn_fwd.md)."""
    even = isinstance(problem.mask, Full) and isinstance(problem.score, Scale) and not problem.varlen
    turns = {2: problem.head_dim_v <= 128, 4: even}.get(config.consumers, False)
    return order.PingPong() if turns else order.Unordered()


def fields(problem: Problem) -> Fields:
    """The fields of struct Args, in order."""
    return tiling.fields(choices(problem), "TmaTensor")


def render(problem: Problem, config: Config, arch: str = arch) -> Source:
    """The source of one configuration; problems that differ in run-time values alone share it."""
    producer, consumer = config.registers
    constants = {**dataclasses.asdict(config), "consumers": config.consumers, "producer_registers": producer}
    constants |= {
        "consumer_registers": consumer,
        "m_tiles_per_warp": 1,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
    }
    products = [
        wgmma("QkMma", problem.element, config.tile_kv, a_in_registers=False, b_by_rows=False, negate=problem.scale < 0),
        wgmma("PvMma", problem.element, problem.head_dim_v, a_in_registers=True, b_by_rows=True),
    ]
    every = choices(problem) | {"Order": order_of(problem, config)}
    return source(file, config_header(constants, fields(problem), products, every), arch)


def grid(problem: Problem, config: Config, device: Device) -> int:
    """Blocks: one for each multiprocessor, or for each query tile where those are fewer."""
    return min(device.sm_count, tiles(problem, config.tile_q))


def boxes(problem: Problem, config: Config) -> dict[str, int]:
    """Rows of the box that a tensor map of q, k and v brings at a time; each is 64 columns wide."""
    return {"q": config.tile_q, "k": config.tile_kv, "v": config.tile_kv}
