"""attn_bwd_dkdv_simt.cu and attn_bwd_dq_simt.cu: the gradients of attention of any number format, stride and GPU, in a pair of
kernels in plain CUDA C."""

from __future__ import annotations

import dataclasses
import functools

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import Layout
from ..variant import Option
from ..variant.field import Fields
from ..variant.walk import QIntervalWalk, QListCursor, lists
from . import backward, tiling
from .attn_bwd_captured import make_launches
from .backward import BackwardKernel, DeltaPass
from .program import Program


@dataclasses.dataclass(frozen=True)
class AttnBwdSimtConfig:
    """The configuration of attn_bwd_dkdv_simt.cu and attn_bwd_dq_simt.cu."""

    tile_q: int = 32
    tile_kv: int = 32
    chunk: int = 64  # columns that are in shared memory at a time
    blocks: int = 1  # of a multiprocessor, for which registers suffice


def configs_of(op: Forward) -> list[AttnBwdSimtConfig]:
    """The configurations for the head sizes, the fastest first (perf/notes/attn_bwd_simt.md). A thread has tile_kv / 16 times
    columns / 16 numbers of dk and of dv in registers, so that wide heads take smaller tiles, and doubles sooner."""
    widest = op.widest
    chunk = min(64, -(-widest // 16) * 16)
    if op.element.lse_bytes == 8:
        tiles = [(tile, tile, 1) for tile, most in ((64, 64), (32, 128), (16, 512)) if widest <= most]
    else:
        tiles = [(64, 64, 2 if widest <= 128 else 1)] * (widest <= 192) + [(32, 32, 1)]
    return [AttnBwdSimtConfig(tile_q, tile_kv, chunk, blocks) for tile_q, tile_kv, blocks in tiles]


def smem_bytes(config: AttnBwdSimtConfig, op: Forward) -> int:
    """Shared memory of a block: parts of two tiles, and P and dS."""
    vector = 16 // op.element.lse_bytes
    rows = (config.tile_q + config.tile_kv) * (config.chunk + vector)
    return op.element.lse_bytes * (rows + 2 * config.tile_q * (config.tile_kv + vector))


class AttnBwdSimt(BackwardKernel):
    """The kernels and their launches."""

    name = "attn_bwd_simt"
    needs = "a GPU of compute capability 7.5 or newer"
    alignment = 1  # any
    config_type = AttnBwdSimtConfig

    def runs_on(self, device: Device) -> bool:
        return device.capability >= 75

    def supports(self, op: Backward, device: Device) -> list[str]:
        sizes = {"head_dim": op.forward.head_dim, "head_dim_v": op.forward.head_dim_v}
        reasons = self.device_reasons(device)
        reasons += [f"{which} is {size}; it takes up to 512" for which, size in sizes.items() if size > 512]
        return reasons + backward.reasons(op, 16, 16)

    def layout_reason(self, layout: Layout) -> str | None:
        return None

    def legal(self, config: AttnBwdSimtConfig, op: Backward, device: Device) -> str | None:
        for which, value in (("tile_q", config.tile_q), ("tile_kv", config.tile_kv), ("chunk", config.chunk)):
            if value % 16 or value < 16:
                return f"{which} is {value}; it must be a multiple of 16"
        return tiling.too_large_block(smem_bytes(config, op.forward), device)

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdSimtConfig]:
        """The fastest configuration that the device's shared memory suffices for."""
        return [config for config in configs_of(op.forward) if self.legal(config, op, device) is None][:1]

    def cost(self, config: AttnBwdSimtConfig, op: Backward, device: Device) -> float:
        """The time of the products at one fused multiplication a clock for each of 128 lanes, which is a lower bound."""
        return op.flops * 7 / 5 / (256 * device.sm_count * 1.5e9)

    def lower(self, op: Backward, config: AttnBwdSimtConfig, device: Device) -> Program:
        forward = op.forward
        shared = backward.values(forward, config.tile_q, config.tile_kv)
        kv_values = shared | backward.kv_order(forward, config.tile_kv, device.sm_count)
        kv_grid = backward.kv_tiles(forward, config.tile_kv) if forward.total_kv else 0
        q_grid = forward.heads * backward.q_blocks(forward, config.tile_q) if forward.total_q else 0
        launch = functools.partial(self.launch, op, config, device)
        dkdv = launch("attn_bwd_dkdv_simt", kv_values, kv_grid, _render_dkdv)
        dq = launch("attn_bwd_dq_simt", shared, q_grid, _render_dq)
        return self.program(op, device, DeltaPass(config.tile_q, config.tile_kv), (dkdv, dq), make_launches)


def _render_dkdv(op: Forward, config: AttnBwdSimtConfig, arch: str) -> tuple[Source, Fields]:
    plan = backward.kv_scheduler(op, draw="SingleTile")
    walk = QListCursor() if lists(op.mask) else QIntervalWalk()
    return _render("attn_bwd_dkdv_simt.cu", op, config, backward.OUTPUTS[:2], {"Scheduler": plan, "Walk": walk}, arch)


def _render_dq(op: Forward, config: AttnBwdSimtConfig, arch: str) -> tuple[Source, Fields]:
    options = {"Scheduler": tiling.lpt_scheduler(op, persistent=False), "Walk": tiling.cursor(op, up=True)}
    return _render("attn_bwd_dq_simt.cu", op, config, backward.OUTPUTS[2:], options, arch)


def _render(
    file: str, op: Forward, config: AttnBwdSimtConfig, outputs: Fields, options: dict[str, Option], arch: str
) -> tuple[Source, Fields]:
    constants = {**dataclasses.asdict(config), "q_block": config.tile_q, "head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
    constants["scale_sign"] = -1 if op.scale < 0 else 1
    every = backward.options(op, Score=op.spec.placed_score, Weight=op.spec.weight, **options)
    fields = (*backward.READS, *outputs, *backward.STATISTICS, *backward.HEADS)
    return backward.rendered(file, constants, fields, [], every, arch)


ATTN_BWD_SIMT = AttnBwdSimt()
