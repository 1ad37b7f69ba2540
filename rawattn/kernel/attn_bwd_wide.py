"""attn_bwd_wide.cu: the gradients of attention on Hopper for heads above 256, in a pass for each of dv, dk and dq."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import PLAIN, Layout
from ..variant import Option, gradients
from ..variant.field import Field, Fields, TensorMap
from ..variant.intervals import differs_by_head
from ..variant.scheduler import LptScheduler, LptVarlenScheduler
from ..variant.walk import lists
from . import backward, group, tiling
from .attn_bwd_captured import make_launches
from .backward import BackwardKernel, DeltaPass
from .program import Program
from .render import wgmma

NARROWEST, WIDEST = 257, 512
STAYS, MOVES = 64, 32  # rows of a block that stay, and of a step
STAY_FIELDS = (("stays", "TmaTensor"), ("stays_v", "TmaTensor"))
# Pass -> its option, and the operands that stay, that are summed, and that make the rest of the weights.
PASSES: dict[str, tuple[Option, tuple[str, str], str, str]] = {
    "dv": (gradients.DvPass(), ("k", "v"), "do", "q"),
    "dk": (gradients.DkPass(), ("k", "v"), "q", "do"),
    "dq": (gradients.DqPass(), ("q", "do"), "k", "v"),
}


@dataclasses.dataclass(frozen=True)
class AttnBwdWideConfig:
    """The configuration of attn_bwd_wide.cu. Registers are those of a thread."""

    tile_q: int = 128  # rows of a cluster that stay, 64 of each block: of dq's pass queries, of the others keys
    tile_kv: int = 32  # rows that move in a step
    stages: int = 3  # of the ring of what is summed; the other ring has the rest of shared memory
    weigh_registers: int = 184
    sum_registers: int = 160
    parts: int = 0  # works into which the query heads of a key head are split; 0 for what sizes suggest

    @property
    def cluster(self) -> int:
        """The blocks that read what moves together."""
        return self.tile_q // STAYS


KEPT_PANELS = 7  # of 64 columns of K or Q at most, which a warpgroup keeps in registers, found by compiling


def sizes(op: Forward, which: str) -> tuple[int, int, int, int]:
    """Bytes of a block's shared memory in a pass: what no ring has, a tile that is summed, a piece of the other, its pieces."""
    d, dv = (-(-columns // 64) for columns in (op.head_dim, op.head_dim_v))
    summed, other = (dv, d) if which == "dv" else (d, dv)
    pieces = min(2, other)
    stays = 0 if which == "dv" else max(d, dv)
    rest = STAYS * 128 * (stays + max(1, d - KEPT_PANELS) + 1) + 1024
    return rest, MOVES * 128 * (summed + summed % 2), MOVES * 128 * -(-other // pieces), pieces


def count_pieces(config: AttnBwdWideConfig, op: Forward, which: str, most: int) -> int:
    """The pieces that a pass has room for in ``most`` bytes, of three tiles at most; 0 where they are too few."""
    rest, summed, piece, each = sizes(op, which)
    pieces = min(3 * each, (most - rest - config.stages * summed) // piece)
    return pieces if pieces >= 2 * each - (which != "dv") else 0


class AttnBwdWide(BackwardKernel):
    """The kernel and its launches."""

    name = "attn_bwd_wide"
    needs = "a Hopper GPU (compute capability 9.0)"
    config_type = AttnBwdWideConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Backward, device: Device) -> bool:
        """Says whether nothing but strides is against it: what else it refuses attn_bwd_mma computes, on tensor cores, too."""
        plain = dataclasses.replace(op, layout=PLAIN)
        return self.runs_on(device) and not self.supports(plain, device)

    def prefers(self, op: Backward, device: Device) -> bool:
        """Says whether rows that stay fill half of the GPU in each pass: none cuts those that move, other than by heads."""
        forward = op.forward
        of_kv = backward.kv_tiles(forward, STAYS) * forward.heads_per_kv
        return min(forward.heads * backward.q_blocks(forward, STAYS), of_kv) >= device.sm_count // 2

    def asks_for_copies(self, op: Backward) -> bool:
        """Says no: the kernels of the forward take such arrays, and autograd can ask for no copy in the backward."""
        return False

    def supports(self, op: Backward, device: Device) -> list[str]:
        forward = op.forward
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(forward, WIDEST)
        if forward.widest < NARROWEST:
            sizes = f"head_dim is {forward.head_dim} and head_dim_v {forward.head_dim_v}"
            reasons.append(f"{sizes}; it takes heads of which one is above 256")
        if any(forward.lens) and not forward.varlen:
            reasons.append("it takes q_lens and kv_lens of packed sequences alone")
        reasons += tiling.list_reasons(forward)
        if lists(forward.mask) or differs_by_head(forward.mask):
            reasons.append("its mask has holes between the tiles that it keeps, or differs by head")
        if forward.spec.dropout:
            reasons.append("it drops no weights")
        return reasons + backward.reasons(op, STAYS, STAYS, places=2) + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported or layout.unaligned

    def legal(self, config: AttnBwdWideConfig, op: Backward, device: Device) -> str | None:
        if config.tile_q not in (64, 128, 256) or config.tile_kv != MOVES:
            return f"tile_q is {config.tile_q} and tile_kv {config.tile_kv}; they must be 64, 128 or 256, and {MOVES}"
        if config.stages < 2:
            return f"stages is {config.stages}; it must be at least 2"
        short = [which for which in PASSES if not count_pieces(config, op.forward, which, device.smem_bytes)]
        if short:
            return f"stages is {config.stages}; the pass of {short[0]} has no shared memory for what else it needs"
        if config.weigh_registers + 2 * config.sum_registers > 504 or config.weigh_registers < 168 or config.sum_registers > 168:
            values = f"weigh_registers is {config.weigh_registers} and sum_registers {config.sum_registers}"
            return f"{values}; they must be from 168 on, up to 168, and 504 with the latter twice"
        return group.wrong(op.forward, config)

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdWideConfig]:
        """The clusters of two; others were never timed."""
        return [config for config in (AttnBwdWideConfig(),) if self.legal(config, op, device) is None]

    def cost(self, config: AttnBwdWideConfig, op: Backward, device: Device) -> float:
        """The time of the products at 0.58 of the full rate of the tensor cores; S is computed three times, dP twice."""
        forward = op.forward
        columns = 5 * forward.head_dim + 3 * forward.head_dim_v
        return tiling.least_seconds(op.flops * columns // (3 * forward.head_dim + 2 * forward.head_dim_v), device) / 0.58

    def lower(self, op: Backward, config: AttnBwdWideConfig, device: Device) -> Program:
        forward, rows, blocks = op.forward, config.tile_q, device.sm_count // config.cluster
        works = backward.kv_tiles(forward, rows)
        config = group.resolved(forward, config, works, rows, blocks)
        shared = backward.values(forward, rows, rows)
        kv_values, kv_source = shared | backward.kv_order(forward, rows, blocks, config.parts), group.source_of(config)
        kv_grid = works * config.parts * config.cluster if forward.total_kv else 0
        launches = []
        for which in PASSES:
            source = dataclasses.replace(kv_source, parts=1) if which == "dq" else kv_source
            grid = forward.heads * backward.q_blocks(forward, rows) * config.cluster if forward.total_q else 0
            asked_of = which, source, count_pieces(config, forward, which, device.smem_bytes)
            in_order = (shared, grid) if which == "dq" else (kv_values, kv_grid)
            launches.append(self.launch(op, asked_of, device, self.name, *in_order, _render))
        launches[-1:-1] = self.add_parts(op, config.parts, device)
        buffers = backward.part_buffers(forward, config.parts)
        return self.program(op, device, DeltaPass(rows, rows, 8), launches, make_launches, buffers)


def _render(op: Forward, asked: tuple[str, AttnBwdWideConfig, int], arch: str) -> tuple[Source, Fields]:
    """The source of one pass."""
    which, config, pieces = asked
    made, stays, summed, other = PASSES[which]
    tensors = [Field(*name, TensorMap(operand, STAYS)) for name, operand in zip(STAY_FIELDS, stays, strict=True)]
    moves = ("summed", summed), ("other", other)
    tensors += [Field(name, "TmaClusterTensor", TensorMap(operand, MOVES)) for name, operand in moves]
    own: dict[str, Option] = {"Score": backward.exact_score(op)}
    if which == "dq":
        constants = {"tile_q": config.tile_q, "tile_kv": MOVES}
        own["Scheduler"] = (LptVarlenScheduler if op.varlen else LptScheduler)(persistent=False, cluster=True)
        rows: Fields = (gradients.DQ,)
    else:
        constants = {"tile_q": MOVES, "tile_kv": config.tile_q}
        rows = backward.group_options(config.parts)["Group"].fields
        own |= {**backward.dkv_rows(config.parts), "Scheduler": backward.kv_scheduler(op, "Ascending", "ClusterTile")}
    constants |= {"stays": STAYS, "moves": MOVES, "q_block": config.tile_q, "kept_panels": KEPT_PANELS}
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v, "cluster": config.cluster, "stages": config.stages}
    constants |= {"pieces": pieces, "weigh_registers": config.weigh_registers, "sum_registers": config.sum_registers}
    fields = (*tensors, *rows, *backward.STATISTICS, *backward.HEADS)
    products = _products(op, op.head_dim_v if which == "dv" else op.head_dim)
    return backward.rendered("attn_bwd_wide.cu", constants, fields, products, backward.options(op, **own, Pass=made), arch)


def _products(op: Forward, columns: int) -> list[str]:
    """The products of dot products, with their left operand in registers or not, and that of sums of so many columns."""
    made = [
        wgmma(name, op.element, MOVES, a_in_registers=kept, b_by_rows=False, negate=name != "DpMma" and op.scale < 0)
        for name, kept in (("SMma", True), ("SLastMma", False), ("DpMma", False))
    ]
    return [*made, wgmma("SumMma", op.element, -(-columns // 128) * 64, a_in_registers=False, b_by_rows=True)]


ATTN_BWD_WIDE = AttnBwdWide()
