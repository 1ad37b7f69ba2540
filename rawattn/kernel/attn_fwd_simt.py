"""attn_fwd_simt.cu: any number format, stride and GPU, in plain CUDA C. What it can do, how it may be configured, its launch."""

from __future__ import annotations

import dataclasses

from ..compiler import Source
from ..device import Device
from ..problem import Problem
from ..render import config_header, source
from ..variant import Fields, Option, element, softmax, store
from . import tiling
from .tiling import RESERVED_SMEM, tiles
from .tiling import tuning_shapes as tuning_shapes
from .tiling import values as values

name = "attn_fwd_simt"
file = "attn_fwd_simt.cu"
alignment = 1  # of the output's pointer and strides: any


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes in rows; columns of K and of V that are in shared memory at a time; threads; blocks on a multiprocessor."""

    tile_q: int = 64
    tile_kv: int = 64
    chunk: int = 64
    v_chunk: int = 64
    threads: int = 256
    ctas_per_sm: int = 1


def runs_on(device: Device) -> bool:
    """Whether the device has the instructions."""
    return device.capability >= 75


def supports(problem: Problem, device: Device) -> str | None:
    """None if this kernel computes the problem on the device, else the reason why not."""
    if not runs_on(device):
        return f"it needs a GPU of compute capability 7.5 or newer, and {device.name} is {device.arch}"
    for which in ("head_dim", "head_dim_v"):
        if getattr(problem, which) > 512:
            return f"{which} is {getattr(problem, which)}; it takes up to 512"
    if problem.constant_time and problem.element == element.FP64:
        return "it takes longer for some numbers of fp64; constant_time is for bf16, fp16 and fp32"
    if tiles(problem, 8) >= 1 << 31:
        return f"{problem.total_q * problem.heads} query rows are more than a grid has blocks for"
    return None


def tma_unsupported_reason(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, pointer: int = 0
) -> str | None:
    """Why the kernel cannot read an array: it reads number by number, wherever they are."""
    return None


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def smem_bytes(config: Config, problem: Problem) -> int:
    """Shared memory of a block: Q, a part of K or V, and P, each row a vector of 16 bytes longer than its numbers."""
    size = 8 if problem.element == element.FP64 else 4
    q = config.tile_q * (size * _round_up(problem.head_dim, config.chunk) + 16)
    kv = config.tile_kv * (size * max(config.chunk, config.v_chunk) + 16)
    return q + kv + config.tile_q * (size * config.tile_kv + 16)


def registers(config: Config, problem: Problem) -> int:
    """Registers of a thread, about: O; S, of which there are two where it has chunks, or a part of O; the vectors that are
    multiplied; and the rest, fitted to what ptxas uses."""
    words = 2 if problem.element == element.FP64 else 1
    rows_each, keys_each = config.tile_q * 16 // config.threads, config.tile_kv // 16
    columns_each = _round_up(problem.head_dim_v, config.v_chunk) // 16
    sums = max(keys_each if problem.head_dim <= config.chunk else 2 * keys_each, config.v_chunk // 16)
    return words * rows_each * (sums + columns_each + 2) + 4 * (rows_each + keys_each) + 52


def legal(config: Config, problem: Problem, device: Device) -> str | None:
    """None if the configuration can be compiled and run for the problem, else the reason why not."""
    if config.threads % 32 or not 32 <= config.threads <= 1024 or config.tile_q % (config.threads // 16) or config.tile_q < 1:
        return f"threads is {config.threads}, tile_q {config.tile_q}; they must be multiples of 32 and of threads / 16"
    for which in ("tile_kv", "chunk", "v_chunk"):
        if getattr(config, which) % 16 or getattr(config, which) < 16:
            return f"{which} is {getattr(config, which)}; it must be a multiple of 16"
    per_block = smem_bytes(config, problem) + RESERVED_SMEM
    if config.ctas_per_sm < 1 or per_block * config.ctas_per_sm > device.smem_bytes + RESERVED_SMEM:
        return f"{config.ctas_per_sm} blocks need {per_block * config.ctas_per_sm} bytes of shared memory; there are {device.smem_bytes}"
    limit = min(255, 65536 // (config.threads * config.ctas_per_sm) // 8 * 8)
    if registers(config, problem) > limit:
        return f"a thread needs about {registers(config, problem)} registers; above {limit} it spills"
    return None


def candidates(problem: Problem, device: Device) -> list[Config]:
    """Every legal configuration worth comparing, with as many blocks as fit."""
    widths = {min(_round_up(n, 16), limit) for n in (problem.head_dim, problem.head_dim_v) for limit in (64, 128)}
    found = []
    for threads in (256, 128):
        for rows_each in (8, 4, 2, 1):
            for tile_kv in (64, 32, 16):
                for width in sorted(widths, reverse=True):
                    chunk, v_chunk = (min(_round_up(n, 16), width) for n in (problem.head_dim, problem.head_dim_v))
                    tile_q = rows_each * threads // 16
                    fitting = [Config(tile_q, tile_kv, chunk, v_chunk, threads, blocks) for blocks in (4, 3, 2, 1)]
                    found += [c for c in fitting if legal(c, problem, device) is None][:1]
    return found


def cost(config: Config, problem: Problem, device: Device) -> float:
    """Estimated seconds, to compare configurations: multiplications and loads from shared memory share the issue slots."""
    rows_each, keys_each = config.tile_q * 16 // config.threads, config.tile_kv // 16
    vectors = (rows_each + keys_each) / (rows_each * keys_each) + 1 / 4 + 1 / rows_each
    warps = min(config.ctas_per_sm * config.threads / 32, 16)
    tiles = -(-problem.q_len // config.tile_q) * problem.batch * problem.heads
    waves = max(1.0, tiles / (device.sm_count * config.ctas_per_sm))
    work = config.tile_q * config.ctas_per_sm * max(1, problem.kv_len) * (problem.head_dim + problem.head_dim_v)
    return waves * work * (1 + vectors) * (1 + 2 / warps) / 128 / 1.5e9


def choices(problem: Problem) -> dict[str, Option]:
    """The choice on each axis, by the name that the kernel has for it."""
    out = store.StoreOLse() if problem.return_lse else store.StoreO()
    return tiling.choices(problem, Softmax=softmax.Plain(), Scheduler=tiling.lpt_scheduler(problem, persistent=False), Store=out)


def fields(problem: Problem) -> Fields:
    """The fields of struct Args, in order."""
    return tiling.fields(choices(problem), "StridedTensor")


def render(problem: Problem, config: Config, arch: str) -> Source:
    """The source of one configuration; problems that differ in run-time values alone share it."""
    constants = {**dataclasses.asdict(config), "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v}
    constants["q_sign"] = -1 if problem.scale < 0 else 1
    return source(file, config_header(constants, fields(problem), [], choices(problem)), arch)


def grid(problem: Problem, config: Config, device: Device) -> int:
    """Blocks: one for each query tile."""
    return tiles(problem, config.tile_q)
