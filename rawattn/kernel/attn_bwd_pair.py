"""attn_bwd_dkdv.cu and attn_bwd_dq.cu: the gradients of attention on Hopper for head sizes up to 256, in a pair of kernels."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import Layout
from ..variant.element import FP32
from ..variant.field import Fields
from ..variant.gradients import DQ
from ..variant.mask import Causal, Full
from ..variant.scheduler import DIRECTIONS
from ..variant.walk import IntervalKeys, ListKeys, QIntervalWalk, QListWalk, lists
from . import backward, group, tiling
from .attn_bwd_captured import make_launches
from .backward import BackwardKernel, DeltaPass
from .program import Program
from .render import wgmma

KEYS = 64  # of a block of attn_bwd_dkdv.cu


@dataclasses.dataclass(frozen=True)
class AttnBwdPairConfig:
    """The configuration of attn_bwd_dkdv.cu and attn_bwd_dq.cu. Registers are those of a thread."""

    tile_q: int = 64  # query rows of a step of attn_bwd_dkdv.cu
    tile_kv: int = 64  # keys of a step of attn_bwd_dq.cu
    q_block: int = 128  # query rows of a block of attn_bwd_dq.cu
    kv_producer_registers: int = 40  # in attn_bwd_dkdv.cu
    kv_consumer_registers: int = 232
    q_producer_registers: int = 40  # in attn_bwd_dq.cu
    q_consumer_registers: int = 232
    direction: str = ""  # in which blocks of attn_bwd_dkdv.cu go; "" for what the mask suggests
    parts: int = 0  # works there into which the query heads of a key head are split; 0 for what sizes suggest


def config_of(op: Forward) -> AttnBwdPairConfig:
    """The configuration for the head sizes: an accumulator of 256 columns takes what the producer can spare, and with dropout
    smaller key tiles. A producer that asks a mask for its tiles, or finds sequences by the rows in use, can spare less."""
    if lists(op.mask):
        return AttnBwdPairConfig(64, 48 if op.head_dim > 248 else 64, 128, 56, 224, 56, 224)
    is_plain = isinstance(op.mask, (Full, Causal)) and op.has_plain_score and not (op.spec.dropout or op.varlen or any(op.lens))
    if op.head_dim <= 248:
        return AttnBwdPairConfig(tile_kv=96 if op.widest <= 160 and is_plain else 64)
    if op.spec.dropout or (op.varlen and any(op.lens)):
        return AttnBwdPairConfig(tile_kv=48)
    return AttnBwdPairConfig(q_producer_registers=24, q_consumer_registers=240)


def smem_bytes(config: AttnBwdPairConfig, op: Forward) -> int:
    """Shared memory of a block, at most: the larger of the two kernels'."""
    qk, v = -(-op.head_dim // 64), -(-op.head_dim_v // 64)
    kv = (KEYS + 2 * config.tile_q) * (qk + v) * 128 + 8 * KEYS * config.tile_q // 2 + 16 * config.tile_q
    q = (config.q_block * (qk + v) + config.tile_kv * (2 * qk + v)) * 128
    return max(kv, q) + 1024


class AttnBwdPair(BackwardKernel):
    """The kernels and their launches."""

    name = "attn_bwd_pair"
    needs = "a Hopper GPU (compute capability 9.0)"
    config_type = AttnBwdPairConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Backward, device: Device) -> bool:
        return self.runs_on(device) and 128 < op.forward.widest <= 256 and op.forward.element != FP32

    def supports(self, op: Backward, device: Device) -> list[str]:
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(op.forward)
        return reasons + backward.reasons(op, 128, KEYS, places=2) + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported or layout.unaligned

    def legal(self, config: AttnBwdPairConfig, op: Backward, device: Device) -> str | None:
        if config.q_block != 128 or config.tile_q not in (16, 32, 64, 128) or config.tile_kv % 16 or config.tile_kv < 16:
            values = f"q_block is {config.q_block}, tile_q {config.tile_q}, tile_kv {config.tile_kv}"
            return f"{values}; they must be 128, a power of 2 from 16 to 128, and a multiple of 16"
        pairs = (
            (config.kv_producer_registers, config.kv_consumer_registers),
            (config.q_producer_registers, config.q_consumer_registers),
        )
        if any(producer + 2 * consumer > 504 for producer, consumer in pairs):
            return f"registers are {pairs}; a block has 504 for three threads"
        if config.direction not in ("", *DIRECTIONS):
            return f"direction is {config.direction!r}; it must be one of {[*DIRECTIONS]}"
        if reason := backward.wrong_direction(op.forward, config.direction) or group.wrong(op.forward, config):
            return reason
        return tiling.too_large_block(smem_bytes(config, op.forward), device)

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdPairConfig]:
        """The configuration that was found for the head sizes."""
        return [config for config in (config_of(op.forward),) if self.legal(config, op, device) is None]

    def cost(self, config: AttnBwdPairConfig, op: Backward, device: Device) -> float:
        """The time of the products at the full rate of the tensor cores, a lower bound; S and dP are computed twice."""
        forward = op.forward
        columns = 4 * forward.head_dim + 3 * forward.head_dim_v
        return tiling.least_seconds(op.flops * columns // (3 * forward.head_dim + 2 * forward.head_dim_v), device)

    def lower(self, op: Backward, config: AttnBwdPairConfig, device: Device) -> Program:
        forward, sms, works = op.forward, device.sm_count, backward.kv_tiles(op.forward, KEYS)
        config = group.resolved(forward, config, works, KEYS, sms)
        shared = backward.values(forward, config.q_block, KEYS)
        kv_values = shared | backward.kv_order(forward, KEYS, sms, config.parts)
        kv_grid = min(sms, works * config.parts) if forward.total_kv else 0
        q_grid = min(sms, forward.heads * backward.q_blocks(forward, config.q_block)) if forward.total_q else 0
        dkdv = self.launch(op, group.source_of(config), device, "attn_bwd_dkdv", kv_values, kv_grid, _render_dkdv)
        dq = self.launch(op, dataclasses.replace(config, parts=1), device, "attn_bwd_dq", shared, q_grid, _render_dq)
        launches = dkdv, *self.add_parts(op, config.parts, device), dq
        return self.program(
            op, device, DeltaPass(config.q_block, KEYS, 8), launches, make_launches, backward.part_buffers(forward, config.parts)
        )


def _make_constants(op: Forward, config: AttnBwdPairConfig, producer: int, consumer: int, **tiles: int) -> dict[str, int]:
    registers = {"producer_registers": producer, "consumer_registers": consumer}
    return {**tiles, "q_block": config.q_block, "consumers": 2, "head_dim": op.head_dim, "head_dim_v": op.head_dim_v, **registers}


def _make_products(op: Forward, n: int, **columns: int) -> list[str]:
    """The products S and dP of ``n`` columns, and the products that are summed, by name, each with its number of columns."""
    products = [
        wgmma("SMma", op.element, n, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
        wgmma("DpMma", op.element, n, a_in_registers=False, b_by_rows=False),
    ]
    return products + [wgmma(name, op.element, width, a_in_registers=True, b_by_rows=True) for name, width in columns.items()]


def _render_dkdv(op: Forward, config: AttnBwdPairConfig, arch: str) -> tuple[Source, Fields]:
    registers = config.kv_producer_registers, config.kv_consumer_registers
    constants = _make_constants(op, config, *registers, tile_q=config.tile_q, tile_kv=KEYS)
    plan = backward.kv_scheduler(op, config.direction)
    walk = QListWalk() if lists(op.mask) else QIntervalWalk()
    every = backward.options(
        op, Score=backward.exact_score(op), Weight=op.spec.weight, Statistics=backward.BY_ROWS, Scheduler=plan, Walk=walk,
        **backward.dkv_rows(config.parts),
    )  # fmt: skip
    fields = (*backward.loads(op, config.tile_q, KEYS), *every["Group"].fields, *backward.STATISTICS, *backward.HEADS)
    products = _make_products(op, config.tile_q, DvMma=op.head_dim_v, DkMma=op.head_dim)
    return backward.rendered("attn_bwd_dkdv.cu", constants, fields, products, every, arch)


def _render_dq(op: Forward, config: AttnBwdPairConfig, arch: str) -> tuple[Source, Fields]:
    registers = config.q_producer_registers, config.q_consumer_registers
    constants = _make_constants(op, config, *registers, tile_q=config.q_block, tile_kv=config.tile_kv)
    fields = (*backward.loads(op, config.q_block, config.tile_kv), DQ, *backward.STATISTICS, *backward.HEADS)
    plan = tiling.lpt_scheduler(op, persistent=True)
    walk = ListKeys() if lists(op.mask) else IntervalKeys()
    every = backward.options(op, Score=backward.exact_score(op), Weight=op.spec.weight, Scheduler=plan, Walk=walk)
    products = _make_products(op, config.tile_kv, DqMma=op.head_dim)
    return backward.rendered("attn_bwd_dq.cu", constants, fields, products, every, arch)


ATTN_BWD_PAIR = AttnBwdPair()
