"""attn_bwd_mma.cu: the gradients of attention on any GPU from Ampere on, in one kernel and a pass before and after it."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import Layout
from ..variant import Option, gradients
from ..variant.element import BF16, FP16, FP32
from ..variant.field import Fields
from ..variant.scheduler import DIRECTIONS
from ..variant.score import Softcap
from ..variant.walk import QBlockSteps, QIntervalSteps, QListSteps, lists
from . import backward, group, tiling
from .attn_bwd_captured import make_launches
from .backward import BackwardKernel, ConvertPass, DeltaPass
from .program import Buffer, Program

STORES: dict[str, tuple[Option, Option]] = {  # of dq, and what is cleared for it
    "ordered": (gradients.DqRedOrdered(), gradients.ClearTurns()),
    "unordered": (gradients.DqRedUnordered(), gradients.ClearDqSum()),
}
LEAST_ROWS = 32  # of a tile, of heads up to 256
LEAST_WIDE_ROWS = 16  # ... and wider


@dataclasses.dataclass(frozen=True)
class AttnBwdMmaConfig:
    """The configuration of attn_bwd_mma.cu."""

    tile_q: int = 64  # query rows of a step
    warps: int = 8
    m_tiles_per_warp: int = 2  # tiles of 16 keys that a warp has
    sharing: int = 2  # warps that have the same keys
    chunk_q: int = 32  # queries whose S a warp has at once
    q_stages: int = 2
    do_stages: int = 2
    dq_row_warps: int = 2  # among which the rows of dq are shared out
    ctas_per_sm: int = 1  # blocks that share a multiprocessor
    dq_vector: int = 4  # numbers of dq that are added at once
    store: str = "ordered"  # how parts of dq meet, of STORES
    direction: str = ""  # in which blocks go; "" for what the mask suggests
    parts: int = 0  # works into which the query heads of a key head are split; 0 for what sizes suggest
    walk: str = ""  # order in which a work takes its heads' tiles, of group.WALKS; "" for what mask and sizes suggest

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def tile_kv(self) -> int:
        return 16 * self.m_tiles_per_warp * self.warps // self.sharing


def config_of(op: Forward, device: Device) -> AttnBwdMmaConfig:
    """The configuration for the head sizes and the shared memory of a multiprocessor: 227 KB, 163 KB, or 99 KB."""
    widest = op.widest
    large, least = has_large_smem(device), device.smem_bytes < 110_000
    if is_wide(op):
        stages, few = 1 + large, AttnBwdMmaConfig(16, 4, 1, 4, 16, do_stages=1)
        config = few if least else AttnBwdMmaConfig(32, 8, 1, 4, q_stages=stages, do_stages=stages)
    elif op.element == FP32:
        config = config_of_fp32(widest, large, least)
    elif widest <= 64:
        half = AttnBwdMmaConfig(warps=4, sharing=1, do_stages=1 + large, ctas_per_sm=2)
        config = AttnBwdMmaConfig(m_tiles_per_warp=1, sharing=1) if least else half
    elif widest <= 128:
        config = AttnBwdMmaConfig(m_tiles_per_warp=1, do_stages=1) if least else AttnBwdMmaConfig()
    elif least:
        config = AttnBwdMmaConfig(tile_q=32, warps=4, m_tiles_per_warp=1, do_stages=1)
    elif device.capability >= 100:
        config = AttnBwdMmaConfig(m_tiles_per_warp=1, sharing=4)
    else:
        config = AttnBwdMmaConfig(sharing=4, q_stages=1 + large, do_stages=1 + large)
    tight = config.m_tiles_per_warp == 2 and is_tight(op, device, config)
    return dataclasses.replace(
        config,
        chunk_q=config.tile_q if is_wide(op) else min(config.tile_q // config.sharing, 16 if tight else 32),
        dq_row_warps=dq_row_warps(op, config),
        dq_vector=4 if device.capability >= 90 else 1,
        store="ordered" if op.spec.deterministic else "unordered",
    )


def is_wide(op: Forward) -> bool:
    """Says whether warps that have the same keys divide the columns: tiles of so wide heads have few queries to divide."""
    return op.widest > 256


def has_large_smem(device: Device) -> bool:
    """Says whether a multiprocessor has 227 KB of shared memory."""
    return device.smem_bytes > 200_000


def config_of_fp32(widest: int, large: bool, least: bool) -> AttnBwdMmaConfig:
    """The configuration of float32, whose tiles take twice the shared memory: of the fewest instructions
    (perf/notes/attn_bwd_simt.md)."""
    small = AttnBwdMmaConfig(tile_q=32, warps=4, ctas_per_sm=1 if least else 2)
    if widest <= 64:
        return AttnBwdMmaConfig(warps=4, q_stages=1, do_stages=1, ctas_per_sm=2) if large else small
    if widest <= 128:
        one_stage = dataclasses.replace(small, m_tiles_per_warp=1, q_stages=1, do_stages=1)
        return AttnBwdMmaConfig(sharing=4, do_stages=1) if large else one_stage
    return AttnBwdMmaConfig(m_tiles_per_warp=1, sharing=4, q_stages=1, do_stages=1)


def is_tight(op: Forward, device: Device, config: AttnBwdMmaConfig) -> bool:
    """Says whether a thread has no registers for S of 32 queries at once, beside dk and dv of 64 columns: found by compiling."""
    if device.capability >= 100:
        return True
    return config.sharing == 2 and (isinstance(op.score, Softcap) or (op.head_dim | op.head_dim_v) % 16 != 0)


def dq_row_warps(op: Forward, config: AttnBwdMmaConfig) -> int:
    """Shares out dq among warps so that the busiest has the fewest blocks of 16 x 16, and reads the least for them."""
    blocks = -(-op.head_dim // 16)

    def cost(rows: int) -> tuple[int, int, int]:
        high, wide = config.tile_q // 16 // rows, -(-blocks // (config.warps // rows))
        return high * wide, high + wide, -rows

    return min((n for n in (1, 2, 4) if n <= min(config.warps, config.tile_q // 16)), key=cost)


def smem_bytes(config: AttnBwdMmaConfig, op: Forward) -> int:
    """Shared memory of a block: tiles of K, V, Q, dO and dS, of P where warps share keys; statistics; the steps and the work."""
    d, dv = (-(-columns // 16) * 16 for columns in (op.head_dim, op.head_dim_v))
    tiles = config.tile_kv * (d + dv) + config.tile_q * (config.q_stages * d + config.do_stages * dv)
    tiles += config.tile_q * config.tile_kv * (2 if config.sharing > 1 and not is_wide(op) else 1)
    sums = 4 * config.tile_q * config.tile_kv * config.sharing if is_wide(op) else 0
    return op.element.itemsize * tiles + 16 * config.tile_q + 128 + sums


def misshapen_wide(config: AttnBwdMmaConfig) -> str | None:
    """The same for heads wider than 256."""
    if (config.warps, config.m_tiles_per_warp, config.sharing) not in ((4, 1, 4), (8, 1, 4), (8, 1, 8)):
        values = f"warps is {config.warps}, m_tiles_per_warp {config.m_tiles_per_warp} and sharing {config.sharing}"
        return f"{values}; for heads wider than 256 they must be 4 or 8, 1, and 4, or 8"
    if config.tile_q not in (16, 32, 64) or config.chunk_q != config.tile_q:
        return (
            f"tile_q is {config.tile_q} and chunk_q {config.chunk_q}; they must be equal, 16, 32 or 64, for heads wider than 256"
        )
    return misshapen(dataclasses.replace(config, warps=8, sharing=4, tile_q=128, chunk_q=32))


def misshapen(config: AttnBwdMmaConfig) -> str | None:
    """The reason why the kernel's parts do not fit together, whatever they are to compute."""
    tile_q, warps, rows = config.tile_q, config.warps, config.dq_row_warps
    if warps not in (4, 8) or config.m_tiles_per_warp not in (1, 2) or config.sharing not in (1, 2, 4):
        values = f"warps is {warps}, m_tiles_per_warp {config.m_tiles_per_warp} and sharing {config.sharing}"
        return f"{values}; they must be 4 or 8, 1 or 2, and 1, 2 or 4"
    if tile_q not in (32, 64, 128) or config.tile_kv < LEAST_ROWS:
        return f"tile_q is {tile_q} and tile_kv {config.tile_kv}; they must be 32, 64 or 128, and at least {LEAST_ROWS}"
    if config.chunk_q < 16 or config.chunk_q % 16 or tile_q % (config.sharing * config.chunk_q):
        part = tile_q // config.sharing
        return f"chunk_q is {config.chunk_q}; it must be a multiple of 16 that divides the {part} queries of a warp"
    if rows not in (1, 2, 4) or tile_q % (16 * rows):
        return f"dq_row_warps is {rows}; it must be 1, 2 or 4, and 16 rows for each of them at most tile_q"
    if config.q_stages not in (1, 2) or config.do_stages not in (1, 2) or not 1 <= config.ctas_per_sm <= 16:
        values = f"q_stages is {config.q_stages}, do_stages {config.do_stages} and ctas_per_sm {config.ctas_per_sm}"
        return f"{values}; they must be 1 or 2, 1 or 2, and from 1 to 16"
    if config.store not in STORES or config.direction not in ("", *DIRECTIONS):
        return f"store is {config.store!r} and direction {config.direction!r}; they must be of {[*STORES]} and {[*DIRECTIONS]}"
    return None


def convert_columns(op: Forward) -> int:
    """The columns of dq that a thread of the last pass has parts of: all, or groups of 32 up to 256, so that nothing spills."""
    parts = [n for n in (1, 2, 3) if op.head_dim % (32 * n) == 0 and op.head_dim <= 256 * n]
    return op.head_dim // parts[0] if parts else op.head_dim


class AttnBwdMma(BackwardKernel):
    """The kernel and its launches."""

    name = "attn_bwd_mma"
    needs = "a GPU of compute capability 8.0 or newer"
    config_type = AttnBwdMmaConfig

    def runs_on(self, device: Device) -> bool:
        return device.capability >= 80

    def meant_for(self, op: Backward, device: Device) -> bool:
        """Says whether it is made for the operation: on Hopper only for float32 and wide heads, which its kernels do not take."""
        return self.runs_on(device) and (device.capability != 90 or op.forward.element == FP32 or is_wide(op.forward))

    def supports(self, op: Backward, device: Device) -> list[str]:
        widest = 512 if op.forward.element != FP32 else 256 if has_large_smem(device) else 128
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(op.forward, widest, (BF16, FP16, FP32))
        least = LEAST_WIDE_ROWS if is_wide(op.forward) else LEAST_ROWS
        return reasons + backward.reasons(op, least, least) + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.unaligned

    def asks_for_copies(self, op: Backward) -> bool:
        """Says no for float32: the kernel of the forward takes such arrays, and autograd can ask for no copy in the backward."""
        return op.forward.element != FP32

    def legal(self, config: AttnBwdMmaConfig, op: Backward, device: Device) -> str | None:
        if reason := (misshapen_wide if is_wide(op.forward) else misshapen)(config):
            return reason
        if config.dq_vector not in ((1, 4) if device.capability >= 90 else (1,)):
            return f"dq_vector is {config.dq_vector}; it must be 1, or 4 from compute capability 9.0 on"
        if config.store == "unordered" and op.forward.spec.deterministic:
            return "store is 'unordered', whose last bits vary from run to run; it needs deterministic=False"
        if config.walk in ("rotated", "bands", "uneven"):
            return f"walk is {config.walk!r}, which attn_bwd alone has; it must be 'by_heads' or 'by_tiles'"
        if reason := backward.wrong_direction(op.forward, config.direction) or group.wrong(op.forward, config):
            return reason
        return tiling.too_much_smem(smem_bytes(config, op.forward), config.ctas_per_sm, device)

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdMmaConfig]:
        """The configuration that was found for the head sizes: dq in order, or unordered where ``deterministic`` is False
        (perf/notes/attn_bwd_mma.md)."""
        return [config for config in (config_of(op.forward, device),) if self.legal(config, op, device) is None]

    def cost(self, config: AttnBwdMmaConfig, op: Backward, device: Device) -> float:
        """The time of the products at half the rate of mma.sync, about what the kernel reaches on an H200."""
        parts = 6 if op.forward.element == FP32 else 1  # three products, of tf32, at half the rate
        return 2 * parts * op.flops / (tiling.mma_flops(device) * device.sm_count * 1.7e9)

    def lower(self, op: Backward, config: AttnBwdMmaConfig, device: Device) -> Program:
        forward, works = op.forward, backward.kv_tiles(op.forward, config.tile_kv)
        config = group.resolved(forward, config, works, config.tile_kv, device.sm_count * config.ctas_per_sm)
        kv_values = backward.values(forward, config.tile_q, config.tile_kv)
        kv_values |= backward.kv_order(
            forward, config.tile_kv, device.sm_count * config.ctas_per_sm, config.parts, group.sums(forward, config, config.parts)
        )
        grid = works * config.parts if forward.total_kv else 0
        dq, clears = (("dq_parts", 1), ("dq_columns", forward.head_dim), ("dq_chains", 1)), STORES[config.store][1]
        chains = int(config.store == "ordered")
        columns = convert_columns(forward)
        last = ConvertPass(
            config.tile_q, config.tile_kv, columns, forward.head_dim // columns, vector=config.dq_vector, dq_chains=chains
        )
        launches = [self.launch(op, group.source_of(config), device, "attn_bwd_mma", kv_values, grid, _render_main)]
        launches += self.add_parts(op, config.parts, device)
        launches += [self.convert(op, last, device)] * (forward.total_q > 0)
        blocks = forward.heads * backward.q_blocks(forward, config.tile_q)
        scratch = [Buffer("dq_sum", blocks * config.tile_q * forward.head_dim * 4)]
        scratch += [Buffer("turns", blocks * 4)] * (config.store == "ordered")
        first = DeltaPass(config.tile_q, config.tile_kv, 16 // forward.element.itemsize, clears, dq)
        return self.program(op, device, first, launches, make_launches, (*scratch, *backward.part_buffers(forward, config.parts)))


def _walk_of(op: Forward, config: AttnBwdMmaConfig) -> Option:
    """The option for the query tiles of a key tile."""
    if op.spec.keys is not None:
        return QBlockSteps(op.spec.keys.block_q)
    return QListSteps(config.store != "unordered") if lists(op.mask) else QIntervalSteps(group.WALKS[config.walk])


def _render_main(op: Forward, config: AttnBwdMmaConfig, arch: str) -> tuple[Source, Fields]:
    constants = {name: value for name, value in dataclasses.asdict(config).items() if isinstance(value, int)}
    del constants["warps"], constants["parts"]
    constants |= {"tile_kv": config.tile_kv, "threads": config.threads, "q_block": config.tile_q}
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v, "scale_sign": -1 if op.scale < 0 else 1}
    blocks = gradients.Blocks32() if op.element == FP32 else gradients.Blocks16()
    every = backward.options(
        op, Blocks=blocks, Sharing=gradients.ByColumns() if is_wide(op) else gradients.ByQueries(),
        Score=backward.exact_score(op), Weight=op.spec.weight, Turn=backward.turn(op),
        **backward.group_options(config.parts), DkvBlocks=gradients.Blocks32() if config.parts > 1 else blocks,
        Walk=_walk_of(op, config),
        DqStore=STORES[config.store][0],
        Scheduler=backward.kv_scheduler(op, config.direction, "SingleTile"), Launch=backward.launch_option(arch),
    )  # fmt: skip
    fields = (*backward.READS, *every["Group"].fields, *backward.STATISTICS, *backward.HEADS)
    return backward.rendered("attn_bwd_mma.cu", constants, fields, [], every, arch)


ATTN_BWD_MMA = AttnBwdMma()
