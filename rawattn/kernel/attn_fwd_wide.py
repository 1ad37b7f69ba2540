"""attn_fwd_wide.cu: forward attention on Hopper for heads above 256."""

from __future__ import annotations

import dataclasses

import numpy as np

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..operation.operand import PLAIN, Layout
from ..variant import Option, scheduler, softmax, store
from ..variant.field import Field, Fields, TensorMap
from ..variant.walk import lists
from . import tiling
from .base import ForwardKernel
from .render import config_header, source, wgmma
from .tiling import kept_keys, tiles

ROWS = TILE_KV = 64  # query rows of a block; keys of a tile, which Q takes the place of
NARROWEST, WIDEST = 257, 512
# Clocks of a multiprocessor, reckoned from products and L2 (perf/notes/wide_heads.md).
_CLOCK = 1.755e9  # per second
_L2 = 24.0  # bytes of L2 in a clock of a multiprocessor, where all read: what attn_mla's lab had
_STEP, _WORK = 900.0, 8000.0  # what else a key tile takes, and a work; guessed


@dataclasses.dataclass(frozen=True)
class AttnFwdWideConfig:
    """The configuration of attn_fwd_wide.cu. Registers are those of a thread."""

    tile_q: int = 128  # query rows of a cluster, 64 of each block
    tile_kv: int = 64
    stages: int = 3  # of the ring of K and V
    weigh_registers: int = 184
    sum_registers: int = 160

    @property
    def cluster(self) -> int:
        """The blocks that read keys and values together."""
        return self.tile_q // ROWS


def half_v(op: Forward) -> int:
    """Columns of O that a warpgroup sums: half of them, in whole panels."""
    return -(-op.head_dim_v // 128) * 64


def q_panels(op: Forward) -> int:
    """Panels of 64 columns of Q at most, which a warpgroup keeps in registers, found by compiling."""
    return 6 if op.spec.dropout else 7


def smem_bytes(config: AttnFwdWideConfig, op: Forward) -> int:
    """Shared memory of a block: the ring, P twice, the panels of Q that no registers are left for, factors and barriers."""
    panels = -(-op.head_dim // 64)
    stage = 128 * TILE_KV * max(panels, half_v(op) // 32)
    rest = max(1, panels - q_panels(op))
    small = 4 * ROWS * 3 + 8 * (3 * config.stages + 6)
    return -(-(config.stages * stage + 128 * ROWS * (2 + rest) + small) // 1024) * 1024


class AttnFwdWide(ForwardKernel):
    """The kernel and its cost model."""

    name = "attn_fwd_wide"
    needs = "a Hopper GPU (compute capability 9.0)"
    file = "attn_fwd_wide.cu"
    config_type = AttnFwdWideConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Forward, device: Device) -> bool:
        """Says whether nothing but strides is against it: what else it refuses attn_fwd_mma computes, on tensor cores, too."""
        return self.runs_on(device) and not self.supports(dataclasses.replace(op, layout=PLAIN), device)

    def prefers(self, op: Forward, device: Device) -> bool:
        return op.invariant or not tiling.is_few(op)

    def supports(self, op: Forward, device: Device) -> list[str]:
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(op, WIDEST)
        if op.widest < NARROWEST:
            reasons.append(f"head_dim is {op.head_dim} and head_dim_v {op.head_dim_v}; it takes heads of which one is above 256")
        if op.kv_lens and not op.varlen:
            reasons.append("it takes kv_lens of packed sequences alone")
        reasons += tiling.list_reasons(op)
        if lists(op.mask):
            reasons.append("its mask has holes between the tiles that it keeps")
        reasons += tiling.too_many_tiles(op, ROWS)
        return reasons + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported

    def legal(self, config: AttnFwdWideConfig, op: Forward, device: Device) -> str | None:
        if config.tile_q not in (64, 128, 256) or config.tile_kv != TILE_KV:
            return f"tile_q is {config.tile_q} and tile_kv {config.tile_kv}; they must be 64, 128 or 256, and {TILE_KV}"
        if config.stages < 3:
            return f"stages is {config.stages}; it must be at least 3"
        if config.weigh_registers + 2 * config.sum_registers > 504 or config.weigh_registers < 168 or config.sum_registers > 168:
            values = f"weigh_registers is {config.weigh_registers} and sum_registers {config.sum_registers}"
            return f"{values}; they must be from 168 on, up to 168, and 504 with the latter twice"
        return tiling.too_large_block(smem_bytes(config, op), device)

    def candidates(self, op: Forward, device: Device) -> list[AttnFwdWideConfig]:
        """The clusters of two with the deepest ring that fits; larger ones were never timed."""
        configs = [AttnFwdWideConfig(stages=stages) for stages in (6, 5, 4, 3)]
        return [config for config in configs if self.legal(config, op, device) is None][:1]

    def cost(self, config: AttnFwdWideConfig, op: Forward, device: Device) -> float:
        """Counts for every key tile the clocks of the products, or of L2, whichever are more."""
        steps, columns = -(-op.head_dim // 16), 2 * half_v(op)
        products = ROWS * TILE_KV * (16 * steps + columns) / 2048
        read = 2 * TILE_KV * (op.head_dim + op.head_dim_v) / config.cluster / _L2
        begin, end = kept_keys(op.spec.placed_mask, op.q_len, op.kv_len, config.tile_q)
        steps_each = np.maximum(-(-end.max(1) // TILE_KV) - begin.min(1) // TILE_KV, 0)
        work = steps_each * (max(products, read) + _STEP) + _WORK
        waves = max(1.0, tiles(op, config.tile_q) * config.cluster / device.sm_count)
        return float(waves * work.mean()) / _CLOCK

    def options(self, op: Forward, config: AttnFwdWideConfig) -> dict[str, Option]:
        out = store.StoreOLse() if op.return_lse else store.StoreO()
        plan = (scheduler.LptVarlenScheduler if op.varlen else scheduler.LptScheduler)(persistent=False, cluster=True)
        return tiling.options(op, Softmax=softmax.LazyRescale(), Scheduler=plan, Store=out)

    def fields(self, op: Forward, config: AttnFwdWideConfig) -> Fields:
        box = TILE_KV // config.cluster
        tensors = [Field("q", "TmaTensor", TensorMap("q", ROWS))]
        tensors += [Field(name, "TmaClusterTensor", TensorMap(name, box)) for name in "kv"]
        return tiling.fields(tensors, self.options(op, config))

    def render(self, op: Forward, config: AttnFwdWideConfig, arch: str) -> Source:
        constants = {**dataclasses.asdict(config), "cluster": config.cluster, "m_tiles_per_warp": 1}
        constants |= {"q_panels": q_panels(op), "head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
        qk = [
            wgmma(name, op.element, TILE_KV, a_in_registers=in_registers, b_by_rows=False, negate=op.scale < 0)
            for name, in_registers in (("QkMma", True), ("QkLastMma", False))
        ]
        pv = wgmma("PvMma", op.element, half_v(op), a_in_registers=False, b_by_rows=True)
        return source(self.file, config_header(constants, self.fields(op, config), [*qk, pv], self.options(op, config)), arch)

    def values(self, op: Forward, config: AttnFwdWideConfig, device: Device) -> dict[str, float]:
        return tiling.values(op, config.tile_q, device)

    def tiles(self, op: Forward, config: AttnFwdWideConfig, device: Device) -> tiling.QueryTiles:
        return super().tiles(op, config, device)._replace(blocks_each=config.cluster)

    def grid(self, op: Forward, config: AttnFwdWideConfig, device: Device) -> int:
        return super().grid(op, config, device) * (config.cluster if op.varlen else 1)


ATTN_FWD_WIDE = AttnFwdWide()
