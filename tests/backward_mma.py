"""config.cuh of attn_bwd_mma.cu, for tests, and the choice of its configuration."""

from __future__ import annotations

import dataclasses

from rawattn.compiler import Source
from rawattn.device import TYPICAL
from rawattn.operation import Forward
from rawattn.program import Field
from rawattn.variant import weight
from rawattn.variant.score import Softcap
from tests import backward
from tests.backward import Choice

STORES = {
    "ordered": Choice("DqRedOrdered", ("variant/store/dq_red_ordered.cuh",), (backward.SUM, backward.TURNS)),
    "unordered": Choice("DqRedUnordered", ("variant/store/dq_red_unordered.cuh",), (backward.SUM,)),
}


@dataclasses.dataclass(frozen=True)
class MmaConfig:
    """A configuration of attn_bwd_mma.cu: queries of a tile; warps; 16-row tiles of keys of each; warps that share keys; queries
    whose S a warp has at once; stages of Q and of dO; warps that share out the rows of dq; blocks of a multiprocessor; numbers of
    dq that are added at once."""

    tile_q: int = 64
    warps: int = 8
    m_tiles_per_warp: int = 2
    sharing: int = 2
    chunk_q: int = 32
    q_stages: int = 2
    do_stages: int = 2
    dq_row_warps: int = 2
    ctas_per_sm: int = 1
    dq_vector: int = 4

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_kv(self) -> int:
        return 16 * self.m_tiles_per_warp * self.warps // self.sharing


@dataclasses.dataclass(frozen=True)
class Passes:
    """What the passes before and after take from the configuration."""

    tile_q: int
    tile_kv: int
    dq_columns: int
    dq_vector: int
    dq_chains: int = 1
    dq_parts: int = 1


def passes(op: Forward, config: MmaConfig) -> Passes:
    return Passes(config.tile_q, config.tile_kv, op.head_dim, config.dq_vector)


def smem_bytes(op: Forward, config: MmaConfig) -> int:
    d, dv = (-(-columns // 16) * 16 for columns in (op.head_dim, op.head_dim_v))
    tiles = config.tile_kv * (d + dv) + config.tile_q * (config.q_stages * d + config.do_stages * dv)
    tiles += config.tile_q * config.tile_kv * (2 if config.sharing > 1 else 1)
    return 2 * tiles + 16 * config.tile_q + 128  # statistics; steps, the turn, the work


def attn_bwd_mma(op: Forward, config: MmaConfig, arch: str, store: str = "ordered", direction: str = "") -> Source:
    """The source of attn_bwd_mma.cu."""
    constants = {**dataclasses.asdict(config), "tile_kv": config.tile_kv, "threads": config.threads, "q_block": config.tile_q}
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v, "scale_sign": -1 if op.scale < 0 else 1}
    del constants["warps"]
    tensors = tuple(Field(name, "StridedTensor") for name in ("q", "k", "v", "d_o"))
    outputs = tuple(Field(name, "StridedOutput") for name in ("dk", "dv"))
    every = backward.choices(op) | {
        "Weight": weight.Identity(), "Scheduler": backward.kv_scheduler(op, direction, persistent=False), "Store": STORES[store],
        "Launch": backward.launch_of(arch),
    }  # fmt: skip
    fields = (*tensors, *outputs, *backward.STATISTICS, *backward.HEADS)
    return dataclasses.replace(backward.finish("attn_bwd_mma.cu", constants, fields, [], every), arch=arch)


def is_tight(op: Forward, arch: str, sharing: int) -> bool:
    """Says whether a thread has no registers for S of 32 queries at once, beside dk and dv of 64 columns: found by compiling."""
    if TYPICAL[arch].capability >= 100:
        return True
    return sharing == 2 and (isinstance(op.score, Softcap) or (op.head_dim | op.head_dim_v) % 16 != 0)


def dq_row_warps(op: Forward, config: MmaConfig) -> int:
    """How warps share out dq: so that the busiest has the fewest blocks of 16 x 16, and reads the least for them."""
    blocks = -(-op.head_dim // 16)

    def cost(rows: int) -> tuple[int, int, int]:
        high, wide = config.tile_q // 16 // rows, -(-blocks // (config.warps // rows))
        return high * wide, high + wide, -rows

    return min((n for n in (1, 2, 4) if n <= min(config.warps, config.tile_q // 16)), key=cost)


def config_of(op: Forward, arch: str) -> MmaConfig:
    """The configuration for the head sizes and the shared memory of a multiprocessor: 227 KB, 163 KB, or 99 KB."""
    device, widest = TYPICAL[arch], max(op.head_dim, op.head_dim_v)
    large, least = device.smem_bytes > 200_000, device.smem_bytes < 110_000
    if widest <= 64:
        half = MmaConfig(warps=4, sharing=1, do_stages=1 + large, ctas_per_sm=2)
        config = MmaConfig(m_tiles_per_warp=1, sharing=1) if least else half
    elif widest <= 128:
        config = MmaConfig(m_tiles_per_warp=1, do_stages=1) if least else MmaConfig()
    elif least:
        config = MmaConfig(tile_q=32, warps=4, m_tiles_per_warp=1, do_stages=1)
    elif device.capability >= 100:
        config = MmaConfig(m_tiles_per_warp=1, sharing=4)
    else:
        config = MmaConfig(sharing=4, q_stages=1 + large, do_stages=1 + large)
    part, tight = config.tile_q // config.sharing, config.m_tiles_per_warp == 2 and is_tight(op, arch, config.sharing)
    return dataclasses.replace(
        config, chunk_q=min(part, 16 if tight else 32), dq_row_warps=dq_row_warps(op, config),
        dq_vector=4 if device.capability >= 90 else 1,
    )  # fmt: skip
