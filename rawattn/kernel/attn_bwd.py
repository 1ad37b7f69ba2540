"""attn_bwd.cu: the gradients of attention on Hopper for head sizes up to 128, in one kernel and a pass before and after it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import Layout
from ..trace.expressions import nodes
from ..trace.pair_axes import PairAxes
from ..variant import Option, gradients
from ..variant.element import FP32
from ..variant.field import Fields
from ..variant.function import FunctionScore
from ..variant.mask import And, Causal, Full, Window
from ..variant.scheduler import DIRECTIONS
from ..variant.score import Softcap
from ..variant.walk import QListWalk, RotatedTurn, lists
from . import attn_bwd_captured, backward, group, tiling
from .attn_bwd_captured import make_launches
from .backward import BackwardKernel, ConvertPass, DeltaPass
from .program import Buffer, Launch, Program
from .render import wgmma

WIDEST = 128  # columns
LONGEST = 32768  # rows of a tuning shape
FINAL_KEYS = (2176, 1088)  # of a query on average, up to which the last contributor finishes dq; head sizes above 64, up to 64
NUMBERS_OF_SUMS = (1, 2, 4, 8)  # of a tile of dq
# Microseconds at head_dim 128, fitted to timings on an H200 (perf/notes/attn_bwd.md): from a block's add to a tile of dq to the
# next block's, where all add at once; a step; what a work takes besides.
HOP, STEP, WORK = 3.0, 2.1, 5.0
TURN, ROUND = 2.0, 3.0  # the same hop where the key tiles of a head begin together; what a work takes besides where they go round
MOST_HOPS = 0.4  # of a launch's time, in which the adds to one sum follow each other: with more of them blocks queue
SMALL_SPILL = 96  # bytes of a thread, stored and loaded: what was measured
STORES: dict[str, tuple[Option, Option]] = {  # of dq, and what is cleared for it
    "ordered": (gradients.DqOrdered(), gradients.ClearTurns()),
    "final": (gradients.DqOrderedFinal(), gradients.ClearTurnsDq()),
    "unordered": (gradients.DqUnordered(), gradients.ClearDqSum()),
}
SUMS: tuple[Option, Option] = (gradients.DqOrderedSums(), gradients.ClearTurnsOfSums())  # "ordered" with several dq_sums
ORDERS: dict[str, tuple[Option, Option]] = {  # of a step's products, and how its statistics lie
    "at_once": (gradients.DqAtOnce(), gradients.StatisticsByRows()),
    "step_later": (gradients.DqStepLater(), gradients.StatisticsByQuads()),
}
STEPS = ("together", "apart")  # in one loop or two


@dataclasses.dataclass(frozen=True)
class AttnBwdConfig:
    """The configuration of attn_bwd.cu."""

    consumers: int = 2  # warpgroups, 64 keys each
    tile_q: int = 64  # query rows of a step
    dq_parts: int = 1  # into which the columns of dq are cut
    dq_columns: int = 128  # of a part
    dq_chains: int = 1  # in which blocks take turns to add to dq
    dq_stages: int = 2  # steps whose dq is under way
    dq_sums: int = 0  # of each tile of dq, to which key tiles add in turn; 0 for what sizes suggest
    producer_registers: int = 40  # of a thread
    consumer_registers: int = 232  # of a thread
    store: str = "ordered"  # how parts of dq meet, of STORES
    direction: str = ""  # in which blocks go; "" for what the mask suggests
    order: str = "at_once"  # when a step's part of dq is made, of ORDERS
    steps: str = "together"  # "apart" where steps with whole tiles have a loop of their own
    parts: int = 0  # works into which the query heads of a key head are split; 0 for what sizes suggest
    walk: str = ""  # order in which a work takes its heads' tiles, of group.WALKS; "" for what mask and sizes suggest
    gradient: str = ""  # the captured array whose gradient is dS, which is stored as it is made; "" for none
    elements: str = ""  # the captured array of pairs of which TMA brings tiles to the place of dS; "" for none

    @property
    def tile_kv(self) -> int:
        return 64 * self.consumers


def config_of(op: Forward, store: str = "ordered") -> AttnBwdConfig:
    """The configuration for the head sizes, found by compiling."""
    if lists(op.mask):
        return dataclasses.replace(list_configs_of(op)[0], store=store)
    config = _choose_registers(op, store)
    return dataclasses.replace(config, steps="apart" if _has_two_loops(op, config) else "together")


def small_configs_of(op: Forward) -> list[AttnBwdConfig]:
    """The configuration with key tiles of 128 where that for the head sizes has 192: with few heads more blocks have a work."""
    is_plain = isinstance(op.mask, (Full, Causal)) and op.has_plain_score and not (op.varlen or any(op.lens) or op.spec.dropout)
    if not is_plain or config_of(op).consumers == 2:
        return []
    config = AttnBwdConfig(dq_columns=op.head_dim)
    return [dataclasses.replace(config, steps="apart" if _has_two_loops(op, config) else "together")]


def _has_two_loops(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether whole tiles have a loop of their own: where that is faster (notes/attn_bwd.md) and fits in registers, of which
    three warpgroups have none to spare for packed sequences."""
    if config.order != "at_once" or not op.has_plain_score or op.spec.offsets is not None:
        return False
    if op.varlen and config.consumers == 3:
        return False
    return isinstance(op.mask, (Causal, Window, And)) or (isinstance(op.mask, Full) and op.widest <= 64)


def _choose_registers(op: Forward, store: str) -> AttnBwdConfig:
    """The configuration of one loop. Three warpgroups have no register to spare for a cap under a window, to make dq themselves,
    for dropout, or for a score that reads elements of pairs; nor for a window or a score where sequences use a part of their
    rows."""
    size, is_cut = op.widest, any(op.lens)
    has_window, is_plain = not isinstance(op.mask, (Full, Causal)), op.has_plain_score
    tight = store == "final" or (has_window and (is_cut or isinstance(op.score, Softcap)))
    reads_pairs = getattr(op.score, "reads_pairs", False)  # their elements take registers before the products are there
    if size <= (56 if tight else 64) and not op.spec.dropout and (is_plain or not is_cut) and not reads_pairs:
        producer, consumer = (56, 152) if size <= 56 else (32, 160)
        return AttnBwdConfig(3, dq_columns=op.head_dim, producer_registers=producer, consumer_registers=consumer, store=store)
    if op.head_dim == WIDEST and is_cut and isinstance(op.mask, Window) and is_plain and not op.spec.dropout:
        return AttnBwdConfig(
            dq_parts=2, dq_columns=64, store=store, order="step_later", producer_registers=56, consumer_registers=224
        )
    if op.head_dim > 112:
        producer, consumer = (24, 240) if reads_pairs else (40, 232)
        return AttnBwdConfig(dq_parts=2, dq_columns=64, producer_registers=producer, consumer_registers=consumer, store=store)
    return AttnBwdConfig(dq_columns=op.head_dim, store=store)


def list_configs_of(op: Forward) -> list[AttnBwdConfig]:
    """The configurations for a mask whose tiles are lists. The first warps ask the mask for them, and how many registers these
    need depends on the mask. A warpgroup that makes all columns of a wide dq needs more than they leave; where heads are wide,
    the last contributor can finish dq only if whole tiles have a loop of their own."""
    plain = AttnBwdConfig(dq_parts=2, dq_columns=64) if op.head_dim > 96 else AttnBwdConfig(dq_columns=op.head_dim)
    if (size := op.widest) > 96:
        plain = dataclasses.replace(plain, producer_registers=56, consumer_registers=224)
        configs = [dataclasses.replace(plain, store=store, steps="apart") for store in ("final", "ordered")]
        return [*configs, dataclasses.replace(plain, order="step_later"), plain]
    registers = ((88, 208),) if size <= 80 else ((72, 216), (56, 224))
    configs = [dataclasses.replace(plain, producer_registers=x, consumer_registers=y) for x, y in registers]
    return configs + [dataclasses.replace(config, store="final") for config in configs]


def _generalize(mask: Any) -> Any:
    """A mask that takes the same registers: the mask itself, or one of its class that keeps the pairs of a causal mask."""
    if isinstance(mask, Full) or lists(mask):
        return mask
    if isinstance(mask, Window):
        return Window(LONGEST, 0)
    return Causal() if isinstance(mask, Causal) else And(Causal(), Window(LONGEST))


def later_configs_of(op: Forward) -> list[AttnBwdConfig]:
    """The configuration that makes dq a step later, where that is faster for long sequences (notes/attn_bwd.md)."""
    measured = op.head_dim == op.head_dim_v > 112 and isinstance(op.mask, (Full, Causal))
    if not measured or not op.has_plain_score or op.spec.dropout or op.spec.offsets is not None:
        return []
    needy = op.varlen and op.head_dim == WIDEST and isinstance(op.mask, Causal)  # what loads spills with fewer registers
    producer, consumer = (56, 224) if needy else (40, 232)
    config = dataclasses.replace(config_of(op), order="step_later", steps="together")
    return [dataclasses.replace(config, producer_registers=producer, consumer_registers=consumer)]


def smem_bytes(config: AttnBwdConfig, op: Forward) -> int:
    """Shared memory of a block, at most: tiles of K, V, Q, dO and dS, parts of dq, statistics and barriers."""
    panels = -(-op.head_dim // 64) - (-op.head_dim_v // 64)
    tiles = 128 * ((config.tile_kv + 2 * config.tile_q) * panels + 2 * config.tile_q * config.consumers)
    return tiles + 256 * config.dq_stages * config.dq_parts * config.dq_columns + 16 * config.tile_q + 1024


def elements_by_tma(op: Forward, layout: Layout) -> tuple[str, PairAxes | None]:
    """The captured array, of two bytes an element, of which the score reads an element for each pair, and its axes, where TMA
    reads tiles of it and knows where queries end; "" and None where there is no such array."""
    score = op.score
    if not isinstance(score, FunctionScore) or score.ahead_bytes != 2 or op.varlen or any(op.lens):
        return "", None
    loads = [score.pair_axes.get(i) for i, x in enumerate(nodes(score.code.root)) if x.op == "load" and {"q", "kv"} <= x.deps]
    if len(loads) != 1 or loads[0] is None or f"score_{loads[0][0]}" not in layout.tma_captured:
        return "", None
    return f"score_{loads[0][0]}", loads[0][1]


def _refuse_tiles(config: AttnBwdConfig, op: Backward) -> str | None:
    """The reason why TMA cannot move the tiles of dS and of elements that the configuration names; None where it can."""
    arrays, read = [*attn_bwd_captured.arrays_with_ds_gradient(op)], elements_by_tma(op.forward, op.layout)[0]
    if config.gradient not in ("", *arrays):
        return f"gradient is {config.gradient!r}; it must be '', or of the captured arrays whose gradient is dS, {arrays}"
    if config.elements not in ("", read):
        return f"elements is {config.elements!r}; it must be '', or the captured array of which TMA brings tiles, {read!r}"
    return None


def _refuse_rounds(config: AttnBwdConfig, op: Backward) -> str | None:
    """The reason why key tiles cannot begin their rounds at different query tiles, where the configuration says so; None where
    they can."""
    if config.walk != "rotated":
        return None
    forward = op.forward
    if forward.varlen or not isinstance(forward.mask, (Full, Causal)) or not forward.has_plain_score or config.gradient:
        return "walk is 'rotated'; it needs sequences of one length, a full or causal mask, and a score that reads no arrays"
    if config.direction not in ("", "Ascending") or not group.adds_in_turns(config):
        return "walk is 'rotated'; it needs direction 'Ascending', and adds to dq in one order"
    return None


def _may_have_sums(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether a tile of dq may have several sums: where contributors are counted, and a pass makes dq."""
    return config.store == "ordered" and not lists(op.mask)


def _has_few_queries(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether the sizes are a kind for which kernels with several sums of a tile of dq are compiled."""
    return not op.varlen and op.kv_len >= 8 * op.q_len and _may_have_sums(op, config)


def _refuse_sums(config: AttnBwdConfig, op: Forward) -> str | None:
    """The reason why a tile of dq cannot have so many sums; None where it can."""
    most = tiling.MOST_TILES // max(1, config.dq_chains * op.heads * backward.q_blocks(op, config.tile_q))
    if config.dq_sums in (0, 1) or (1 < config.dq_sums <= most and _may_have_sums(op, config)):
        return None
    return f"dq_sums is {config.dq_sums}; up to {most} are counted, and several need store 'ordered' and a mask without lists"


def _count_sums(op: Forward, config: AttnBwdConfig, blocks: int) -> int:
    """The sums of each tile of dq that keep ``blocks`` from queuing for them.

    Those beside the first take at most a tenth of what k and v do. So there are some only where queries are far fewer than keys,
    which is where blocks queue (perf/notes/attn_bwd.md)."""
    if not _has_few_queries(op, config):
        return 1
    tiles = op.heads * backward.q_blocks(op, config.tile_q)
    time = op.batch * op.kv_heads / blocks * (-(-op.q_len // config.tile_q) * op.heads_per_kv * STEP + WORK)  # a key tile
    of_sum = tiles * config.tile_q * config.dq_columns * config.dq_parts * 4
    of_keys = op.batch * op.kv_len * op.kv_heads * (op.head_dim + op.head_dim_v) * op.element.itemsize
    fitting = [n for n in NUMBERS_OF_SUMS if (n - 1) * of_sum * 10 <= of_keys]
    return next((n for n in fitting if HOP / n <= MOST_HOPS * time), fitting[-1])


def _store_of(config: AttnBwdConfig) -> tuple[Option, Option]:
    """The options that say how parts of dq meet, and what is cleared for that."""
    return SUMS if config.dq_sums > 1 else STORES[config.store]


def _goes_round(op: Backward, config: AttnBwdConfig, blocks: int) -> bool:
    """Says whether key tiles go round, by what is expected: works that begin together wait for the key tiles before them once, a
    hop each, and rounds wait for nobody, but a block has its works beforehand, in windows (perf/notes/attn_bwd.md)."""
    forward, parts = op.forward, config.parts  # rounds of parts of heads were not timed
    kv_tiles, q_tiles = -(-forward.kv_len // config.tile_kv), -(-forward.q_len // config.tile_q)
    rotated = dataclasses.replace(config, walk="rotated", direction="")
    is_square = isinstance(forward.mask, Full) and 8 <= kv_tiles <= q_tiles / 1.5
    if parts > 1 or not is_square or _refuse_rounds(rotated, op) is not None:
        return False
    heads, work = forward.kv_heads * forward.batch, q_tiles * forward.heads_per_kv * STEP
    windows = -(-kv_tiles // blocks)
    rounds = -(-heads // max(1, blocks // -(-kv_tiles // windows))) * windows
    return rounds * (work + ROUND) < -(-heads * kv_tiles // blocks) * work + kv_tiles * TURN


def _choose_direction(op: Forward, config: AttnBwdConfig) -> str:
    """The order of works of packed sequences under a causal mask: with a head for each key head short sequences descend, since
    those whose works all begin at the last query tile wait for each other; parts of heads that go in step have the longest
    first."""
    if not op.varlen or not isinstance(op.mask, Causal) or not group.adds_in_turns(config):
        return ""
    in_step = config.parts > 1 and config.walk == "by_tiles"
    return "AlternatingLong" if op.heads_per_kv == 1 else "LongestFirst" if in_step else ""


def _window_values(op: Forward, config: AttnBwdConfig, blocks: int) -> dict[str, float]:
    """The run-time numbers of key tiles that go round: equal windows of a head, each of as many key tiles as begin at query tiles
    of their own, and equal groups of as many heads as ``blocks`` have windows for."""
    if config.walk != "rotated":
        return {}
    blocks = max(1, blocks)  # none without keys
    kv_tiles, q_tiles = max(1, -(-op.kv_len // config.tile_kv)), max(1, -(-op.q_len // config.tile_q))
    window = -(-kv_tiles // -(-kv_tiles // min(kv_tiles, q_tiles, blocks)))
    heads = max(1, op.kv_heads * op.batch * config.parts)
    groups = -(-heads // max(1, blocks // window))
    size = -(-heads // groups)
    return {
        "l2_head_group": size, "last_group": -(-heads // size) - 1, "window_tiles": window,
        "q_stride": min(256 * q_tiles // window, (1 << 31) - 1),
    }  # fmt: skip


def _use_tma(op: Backward, config: AttnBwdConfig) -> AttnBwdConfig:
    """The configuration that moves tiles of dS and of elements by TMA where it can be. Elements then take no registers, and wide
    heads have those of other scores."""
    gradient, elements = next(iter(attn_bwd_captured.arrays_with_ds_gradient(op)), ""), elements_by_tma(op.forward, op.layout)[0]
    if elements and (config.producer_registers, config.consumer_registers) == (24, 240):
        config = dataclasses.replace(config, producer_registers=40, consumer_registers=232)
    return dataclasses.replace(config, gradient=gradient, elements=elements)


def _choose_ds_store(op: Backward, config: AttnBwdConfig) -> Option:
    """The option for what becomes of dS besides dq. Tiles that a mask leaves out are filled, unless they were cleared before."""
    if not config.gradient:
        return gradients.DsKept()
    forward, axes = op.forward, attn_bwd_captured.arrays_with_ds_gradient(op)[config.gradient]
    is_whole = isinstance(forward.mask, Full) or attn_bwd_captured.is_cleared_for_ds(forward, config.gradient)
    kind = gradients.DsStored if is_whole else gradients.DsStoredFilled
    return kind(config.gradient, axes, config.tile_q)


def _choose_elements(op: Backward, config: AttnBwdConfig) -> Option:
    """The option for who brings the elements of pairs that the score reads."""
    axes = elements_by_tma(op.forward, op.layout)[1] if config.elements else None
    once = config.gradient == config.elements
    return gradients.TmaElements(config.elements, axes, config.tile_q, once) if axes else gradients.TransposedElements()


class AttnBwd(BackwardKernel):
    """The kernel and its launches."""

    name = "attn_bwd"
    needs = "a Hopper GPU (compute capability 9.0)"
    config_type = AttnBwdConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Backward, device: Device) -> bool:
        return self.runs_on(device) and op.forward.widest <= WIDEST and op.forward.element != FP32

    def supports(self, op: Backward, device: Device) -> list[str]:
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(op.forward, WIDEST)
        return reasons + backward.reasons(op, 64, 128, places=2) + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported or layout.unaligned

    def legal(self, config: AttnBwdConfig, op: Backward, device: Device) -> str | None:
        forward, columns = op.forward, config.dq_parts * config.dq_columns
        if config.consumers not in (2, 3) or config.tile_q != 64:
            return f"consumers is {config.consumers} and tile_q {config.tile_q}; they must be 2 or 3, and 64"
        if config.dq_parts not in (1, config.consumers) or config.dq_chains not in (1, config.dq_parts):
            return f"dq_parts is {config.dq_parts} and dq_chains {config.dq_chains}; each must be 1 or one for each of its makers"
        if config.dq_columns % 8 or columns < forward.head_dim or config.dq_stages not in (1, 2):
            return (
                f"dq has {columns} columns in {config.dq_stages} stages; it needs {forward.head_dim}, in parts of 8, and 1 or 2"
            )
        if config.dq_parts > 1 and config.dq_columns < min(64, forward.head_dim):
            return f"dq_columns is {config.dq_columns}; several parts must be of 64 columns or more, a panel"
        if config.store not in STORES or config.direction not in ("", *DIRECTIONS):
            return (
                f"store is {config.store!r} and direction {config.direction!r}; they must be of {[*STORES]} and {[*DIRECTIONS]}"
            )
        if config.order not in ORDERS:
            return f"order is {config.order!r}; it must be of {[*ORDERS]}"
        plain = forward.has_plain_score and not forward.spec.dropout
        if config.order == "step_later" and (config.dq_parts == 1 or not plain):
            return (
                "order is 'step_later'; it needs a part of dq for each of its makers, and scores and weights that nothing changes"
            )
        if config.steps not in STEPS:
            return f"steps is {config.steps!r}; it must be of {[*STEPS]}"
        if config.steps == "apart" and config.order != "at_once" and not lists(forward.mask):
            return "steps is 'apart'; it needs order 'at_once', or a mask whose tiles are lists"
        if config.steps == "apart" and config.elements and not lists(forward.mask):
            return "steps is 'apart' and elements come by TMA; tiles that are skipped would take their place before they come"
        is_taken = lists(forward.mask) or (config.gradient and not isinstance(forward.mask, Full))
        if config.dq_chains == 3 and is_taken:
            return "dq_chains is 3; no warp is left for a mask whose tiles are lists, or for the zeros of one that skips tiles"
        if config.store == "unordered" and forward.spec.deterministic:
            return "store is 'unordered', whose last bits vary from run to run; it needs deterministic=False"
        if reason := _refuse_tiles(config, op) or _refuse_rounds(config, op) or _refuse_sums(config, forward):
            return reason
        if reason := backward.wrong_direction(forward, config.direction) or group.wrong(forward, config):
            return reason
        threads = 128 * (1 + config.consumers)
        if 128 * (config.producer_registers + config.consumers * config.consumer_registers) > 65536 // threads // 8 * 8 * threads:
            return f"registers are {config.producer_registers} and {config.consumer_registers}; a block has not so many"
        return tiling.too_large_block(smem_bytes(config, forward), device)

    def tuning_shapes(self, op: Backward) -> tuple[Backward, ...]:
        """The operation at two lengths, with few contributors to a tile of dq and with many; and with one head, where few heads
        have a configuration of their own."""
        plain = tiling.with_mask(op.forward, _generalize(op.forward.mask))
        plain = dataclasses.replace(plain, spec=plain.spec.at(op.forward.spec.offsets and (0, 0)), heads=8, kv_heads=8)
        sizes = ((512, 8), (LONGEST, 8), *[(LONGEST // 4, 1)] * bool(small_configs_of(op.forward)))  # lengths, heads
        forwards = (
            dataclasses.replace(plain, batch=1, q_len=n, kv_len=n, heads=heads, kv_heads=heads, total_q=n, total_kv=n)
            for n, heads in sizes
        )
        return tuple(dataclasses.replace(op, forward=forward) for forward in forwards)

    def is_tried(self, op: Backward) -> bool:
        return lists(op.forward.mask)

    def small_spill(self, op: Backward) -> int:
        """The bytes for wide heads: what a work needs between its steps, and one or two words of a step."""
        return SMALL_SPILL if op.forward.widest > 96 else 0

    def counts_spills(self, launch: Launch) -> bool:
        """Says whether it is the main one: the pass before calls what asks a mask for lists, which keeps registers."""
        return launch.entry == self.name

    def candidates(self, op: Backward, device: Device) -> list[AttnBwdConfig]:
        """The configurations found for the head sizes: one for each way to finish dq, and one that makes dq a step later."""
        forward = op.forward
        if lists(forward.mask):
            configs = list_configs_of(forward)
        else:
            configs = [config_of(forward), config_of(forward, "final"), *later_configs_of(forward), *small_configs_of(forward)]
        return [config for config in map(functools.partial(_use_tma, op), configs) if self.legal(config, op, device) is None]

    def cost(self, config: AttnBwdConfig, op: Backward, device: Device) -> float:
        """The time of the products at the full rate of the tensor cores, a lower bound, by how dq is finished and made.

        Where few key tiles add to a tile of dq, the last of them finishes it best, else a pass of its own; and then dq is better
        made a step later (notes/attn_bwd.md). Where tiles are lists, only the device knows how many key tiles add: few are
        expected, whatever the length."""
        forward, seconds = op.forward, tiling.least_seconds(op.flops, device)
        if lists(forward.mask) and (config.store == "final" or config.steps == "apart"):
            return seconds * (0.9 if config.store == "final" else 0.97)
        if config.store != "final":
            return seconds * (0.98 if config.order == "step_later" else self._idle(config, forward, device))
        q_len = max(1, round(forward.total_q / max(1, forward.batch)))
        return seconds * (0.95 if forward.pairs <= q_len * FINAL_KEYS[forward.widest <= 64] else 1.05)

    def _idle(self, config: AttnBwdConfig, op: Forward, device: Device) -> float:
        """The factor by which tiles of so many keys take longer, where there are other sizes: 192 where not every block has a
        work, and 128 else (perf/notes/attn_bwd.md)."""
        few = backward.kv_tiles(op, 128) <= device.sm_count
        return 1.0 if config.consumers == (2 if few else 3) or not small_configs_of(op) else 1.02

    def programs(self, op: Backward, config: AttnBwdConfig, device: Device) -> tuple[Program, ...]:
        """Those of one sum of each tile of dq, and of several where lengths may ask for them."""
        several = config.dq_sums == 0 and _has_few_queries(op.forward, config)
        kinds = [dataclasses.replace(config, dq_sums=n) for n in (1, 2)] if several else [config]
        rotated = dataclasses.replace(config, parts=1, walk="rotated", dq_sums=1)
        if isinstance(op.forward.mask, Full) and not config.walk and _refuse_rounds(rotated, op) is None:
            kinds.append(rotated)
        return tuple(program for kind in kinds for program in super(AttnBwd, self).programs(op, kind, device))

    def resolved(self, op: Backward, config: AttnBwdConfig, device: Device) -> AttnBwdConfig:
        """The configuration with what sizes suggest where it says nothing: sums of dq, parts of heads, walk and direction."""
        forward, blocks, is_asked = op.forward, device.sm_count, config.walk
        config = group.resolved(forward, config, backward.kv_tiles(forward, config.tile_kv), config.tile_kv, blocks)
        walk = "rotated" if not is_asked and _goes_round(op, config, blocks) else config.walk
        direction = config.direction or _choose_direction(forward, config)
        count = config.dq_sums or _count_sums(forward, config, blocks)
        return dataclasses.replace(config, walk=walk, direction=direction, dq_sums=count)

    def lower(self, op: Backward, config: AttnBwdConfig, device: Device) -> Program:
        forward, works = op.forward, backward.kv_tiles(op.forward, config.tile_kv)
        config = self.resolved(op, config, device)
        kv_values = backward.values(forward, config.tile_q, config.tile_kv)
        sums = group.sums(forward, config, config.parts)
        kv_values |= backward.kv_order(forward, config.tile_kv, device.sm_count, config.parts, sums)
        blocks = forward.heads * backward.q_blocks(forward, config.tile_q)
        grid = min(device.sm_count, works * config.parts) if forward.total_kv else 0
        kv_values |= _window_values(forward, config, grid)
        launches = attn_bwd_captured.cleared_for_ds(self, op, device, config.gradient) if config.gradient else []
        main = functools.partial(_render_main, _choose_ds_store(op, config), _choose_elements(op, config))
        of_source = dataclasses.replace(group.source_of(config), dq_sums=min(config.dq_sums, 2))
        launches += [self.launch(op, of_source, device, "attn_bwd", kv_values, grid, main)]
        launches += self.add_parts(op, config.parts, device)
        if config.store != "final" and forward.total_q:
            chains = config.dq_chains if config.store == "ordered" else 0
            last = ConvertPass(config.tile_q, config.tile_kv, config.dq_columns, config.dq_parts, dq_chains=chains)
            last = dataclasses.replace(last, sum=gradients.IntervalSums() if config.dq_sums > 1 else backward.ONE_SUM)
            launches.append(self.convert(op, last, device))
        blocks *= config.dq_sums
        scratch = [Buffer("dq_sum", blocks * config.tile_q * config.dq_columns * config.dq_parts * 4)]
        scratch += [Buffer("turns", blocks * config.dq_chains * 4)] * (config.store != "unordered")
        cleared = gradients.ClearListTurnsDq() if config.store == "final" and lists(forward.mask) else _store_of(config)[1]
        dq = tuple((name, getattr(config, name)) for name in ("dq_parts", "dq_columns", "dq_chains"))
        first = DeltaPass(config.tile_q, config.tile_kv, 8, cleared, dq, ORDERS[config.order][1])
        scratch += backward.part_buffers(forward, config.parts)
        program = self.program(op, device, first, launches, make_launches, (*scratch,), config.gradient)
        return program.with_values({"dq_sums": config.dq_sums} if config.dq_sums > 1 else {})


def _render_main(ds: Option, elements: Option, op: Forward, config: AttnBwdConfig, arch: str) -> tuple[Source, Fields]:
    numbers = {name: value for name, value in dataclasses.asdict(config).items() if isinstance(value, int)}
    del numbers["parts"], numbers["dq_sums"]
    constants = {**numbers, "tile_kv": config.tile_kv, "q_block": config.tile_q}
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
    products = [
        wgmma("SMma", op.element, config.tile_q, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
        wgmma("DpMma", op.element, config.tile_q, a_in_registers=False, b_by_rows=False),
        wgmma("DvMma", op.element, op.head_dim_v, a_in_registers=True, b_by_rows=True),
        wgmma("DkMma", op.element, op.head_dim, a_in_registers=True, b_by_rows=True),
        wgmma("DqMma", op.element, config.dq_columns, a_in_registers=False, b_by_rows=True),
    ]
    walk = QListWalk(config.store != "unordered", config.store == "final") if lists(op.mask) else group.WALKS[config.walk]
    rotated = config.walk == "rotated"
    plan = backward.kv_scheduler(op, "Ascending", "StaticPersistent") if rotated else backward.kv_scheduler(op, config.direction)
    every = backward.options(
        op, Score=backward.exact_score(op), Weight=op.spec.weight, **backward.dkv_rows(config.parts),
        Scheduler=plan, Turn=RotatedTurn() if rotated else backward.turn(op), Walk=walk,
        DqStore=_store_of(config)[0], Statistics=ORDERS[config.order][1], DsStore=ds, Elements=elements,
        StepOrder=ORDERS[config.order][0],
        Steps=gradients.OneLoop() if config.steps == "together" else gradients.TwoLoops(lists(op.mask)),
    )  # fmt: skip
    loads = backward.loads(op, config.tile_q, config.tile_kv)
    fields = (*loads, *every["Group"].fields, gradients.DQ, *backward.STATISTICS, *backward.HEADS)
    return backward.rendered("attn_bwd.cu", constants, fields, products, every, arch)


ATTN_BWD = AttnBwd()
