"""attn_bwd.cu: the gradients of attention on Hopper in one kernel and a pass before and after it, for head sizes up to 192 where
q and v have up to 320 columns together."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Backward, Forward
from ..operation.operand import Layout
from ..trace.expressions import nodes
from ..trace.pair_axes import PairAxes
from ..variant import Option, gradients, scheduler, weight
from ..variant.element import FP32
from ..variant.field import Fields
from ..variant.function import FunctionScore
from ..variant.intervals import IntervalMask, is_interval
from ..variant.mask import And, Causal, Full, Window
from ..variant.scheduler import DIRECTIONS
from ..variant.score import Scale, Softcap
from ..variant.walk import QBlockWalk, QBlockWalkByTime, QIntervalPart, QIntervalRotatedPacked, QListWalk, RotatedTurn, lists
from . import attn_bwd_captured, attn_bwd_works, backward, group, tiling
from .attn_bwd_captured import make_launches
from .backward import BackwardKernel, ConvertPass, DeltaPass
from .program import Buffer, Launch, Program
from .render import wgmma

WIDEST = 128  # columns
SMEM = 232448  # bytes of a block
WIDEST_HEAD, WIDEST_PAIR = 192, 320  # of q or v alone, and of both, where dP has the registers of S
LONGEST = 32768  # rows of a tuning shape
FINAL_KEYS = (2176, 1088)  # of a query on average, up to which the last contributor finishes dq; head sizes above 64, up to 64
LARGE_WORK = 1.37  # time of a key tile of 192 over one of 128, at head_dim 64
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
    "dp_later": (gradients.DpLater(), gradients.StatisticsByRows()),
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
    dq_stages: int = 2  # steps whose dq has a place in shared memory
    q_stages: int = 2  # steps whose Q has
    do_stages: int = 2  # steps whose dO has
    ds_stages: int = 2  # steps whose dS has
    dq_sums: int = 0  # of each tile of dq, to which key tiles add in turn; 0 for what sizes suggest
    producer_registers: int = 40  # of a thread
    consumer_registers: int = 232  # of a thread
    store: str = "ordered"  # how parts of dq meet, of STORES
    direction: str = ""  # in which blocks go; "" for what the mask suggests
    order: str = "at_once"  # when a step's part of dq is made, of ORDERS
    steps: str = "together"  # "apart" where steps with whole tiles have a loop of their own
    parts: int = 0  # works into which the query heads of a key head are split; 0 for what sizes suggest
    walk: str = ""  # order in which a work takes its heads' tiles, of group.WALKS; "" for what mask and sizes suggest
    heads_together: int = 0  # of sequences of one length, whose key tiles are taken together; 0 for what sizes suggest
    bundle: int = -1  # works a block, of packed sequences side by side; 0: one after the other; -1: as sizes suggest
    turns: str = ""  # "by_time" where key tiles of lists of blocks add to dq as they come to it, not in their own order
    query_parts: int = 0  # works into which the query tiles of a key tile are split; 0 for what sizes suggest
    gradient: str = ""  # the captured array whose gradient is dS, which is stored as it is made; "" for none
    elements: str = ""  # the captured array of pairs of which TMA brings tiles to the place of dS; "" for none

    @property
    def tile_kv(self) -> int:
        return 64 * self.consumers


def config_of(op: Forward, store: str = "ordered") -> AttnBwdConfig:
    """The configuration for the head sizes, found by compiling."""
    if lists(op.mask):
        return dataclasses.replace(list_configs_of(op)[0], store=store)
    if op.widest > WIDEST:
        return wide_config_of(op)
    config = _choose_registers(op, store)
    return dataclasses.replace(config, steps="apart" if _has_two_loops(op, config) else "together")


def wide_config_of(op: Forward) -> AttnBwdConfig:
    """The configuration for heads above 128 columns (perf/notes/attn_bwd.md): dk and dv fill the registers, and shared memory has
    room for dq and dS of one step, and mostly for dO of one. Nobody has timed it where it has room for Q of one alone."""
    columns = max(64, -(-op.head_dim // 16) * 8)
    config = AttnBwdConfig(dq_parts=2, dq_columns=columns, dq_stages=1, producer_registers=24, consumer_registers=240)
    is_apart = isinstance(op.mask, (Full, Causal, Window)) and not op.varlen and not any(op.lens)
    config = dataclasses.replace(config, order="dp_later", ds_stages=1, steps="apart" if is_apart else "together")
    configs = [dataclasses.replace(config, q_stages=q, do_stages=do) for q, do in ((2, 2), (2, 1), (1, 1))]
    return next((each for each in configs if smem_bytes(each, op) <= SMEM), configs[-1])


def small_configs_of(op: Forward) -> list[AttnBwdConfig]:
    """The configuration with key tiles of 128 where that for the head sizes has 192: with few heads more blocks have a work."""
    is_plain = isinstance(op.mask, (Full, Causal)) and op.has_plain_score and not (op.varlen or any(op.lens) or op.spec.dropout)
    if not is_plain or config_of(op).consumers == 2:
        return []
    config = AttnBwdConfig(dq_columns=op.head_dim)
    return [dataclasses.replace(config, steps="apart" if _has_two_loops(op, config) else "together")]


def _has_two_loops(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether whole tiles have a loop of their own: where that is faster (notes/attn_bwd.md) and fits in registers, of which
    three warpgroups have none to spare for packed sequences, and need it for dropout."""
    drops, packed_in_three = bool(op.spec.dropout), op.varlen and config.consumers == 3
    if drops and config.consumers == 3:
        return True
    if config.order != "at_once" or not op.has_plain_score or op.spec.offsets is not None or packed_in_three:
        return False
    return isinstance(op.mask, (Causal, Window, And, IntervalMask)) or (isinstance(op.mask, Full) and (op.widest <= 64 or drops))


def _choose_registers(op: Forward, store: str) -> AttnBwdConfig:
    """The configuration of one loop. Three warpgroups have no register to spare for a cap under a window, to make dq themselves,
    for first and last keys of queries, or for a score that reads elements of pairs; nor for a window or a score where sequences
    use a part of their rows. Dropout spills some in them, and is faster (notes/attn_bwd.md)."""
    size, is_cut = op.widest, any(op.lens)
    has_window, is_plain = not isinstance(op.mask, (Full, Causal)), op.has_plain_score
    tight = store == "final" or (has_window and (is_cut or isinstance(op.score, Softcap)))
    has_arrays = is_interval(op.mask)
    reads_pairs = getattr(op.score, "reads_pairs", False)  # their elements take registers before the products are there
    if op.spec.dropout and size <= 64 and _drops_in_three(op):
        return AttnBwdConfig(3, dq_columns=op.head_dim, producer_registers=32, consumer_registers=160, store=store)
    if size <= (56 if tight else 64) and not op.spec.dropout and (is_plain or not is_cut) and not (reads_pairs or has_arrays):
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


def _drops_in_three(op: Forward) -> bool:
    """Says whether three warpgroups have the registers for dropout of weights as they are packed, but for some words."""
    is_known = isinstance(op.mask, (Full, Causal, Window)) and isinstance(op.score, (Scale, Softcap))
    return is_known and op.spec.offsets is None and (op.has_plain_score or not any(op.lens))


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
    if isinstance(mask, Full) or lists(mask) or is_interval(mask):
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


def _is_plain(op: Forward) -> bool:
    """Says whether nothing changes weights and scores, and tiles lie side by side."""
    return op.has_plain_score and not op.spec.dropout and not lists(op.mask)


def _shares_panel(config: AttnBwdConfig) -> bool:
    """Says whether a part of dq is a panel of 64 columns and a half of what is beyond the panels of all parts."""
    return config.dq_parts > 1 and config.dq_columns > 64


def smem_bytes(config: AttnBwdConfig, op: Forward) -> int:
    """Shared memory of a block, at most: tiles of K, V, Q, dO and dS, parts of dq, statistics and barriers."""
    qk, v = -(-op.head_dim // 64), -(-op.head_dim_v // 64)
    of_queries = config.q_stages * qk + config.do_stages * v + config.ds_stages * config.consumers
    tiles = 128 * (config.tile_kv * (qk + v) + config.tile_q * of_queries)
    dq = config.dq_stages * 4 * config.tile_q * config.dq_parts * config.dq_columns
    return tiles + dq + 16 * config.tile_q + 1024


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


def _refuse_wide(config: AttnBwdConfig, op: Forward) -> str | None:
    """The reason why heads are too wide for the order, or the rest of the configuration does not fit it; None where it fits."""
    stages = config.q_stages, config.do_stages, config.ds_stages
    if op.widest > WIDEST and config.order != "dp_later":
        return f"order is {config.order!r}; heads of {op.head_dim} and {op.head_dim_v} columns need 'dp_later'"
    is_late = config.order == "step_later" or config.gradient or config.elements
    if not {*stages} <= {1, 2} or (config.ds_stages == 1 and is_late):
        return f"q_stages, do_stages and ds_stages are {stages}; they must be 1 or 2, and dS that is read later or stored needs 2"
    if _shares_panel(config) and (config.dq_columns > 96 or config.dq_parts != 2 or config.dq_chains > 1):
        return f"dq_columns is {config.dq_columns} in {config.dq_parts} parts; two of up to 96 may share a panel, in one chain"
    if config.store == "final" and (config.dq_stages == 1 or _shares_panel(config)):
        return "store is 'final'; it needs dq_stages 2, and parts of dq that are whole panels"
    return None


def _store_of(config: AttnBwdConfig) -> tuple[Option, Option]:
    """The options that say how parts of dq meet, and what is cleared for that."""
    return SUMS if config.dq_sums > 1 else STORES[config.store]


def _use_tma(op: Backward, config: AttnBwdConfig) -> AttnBwdConfig:
    """The configuration that moves tiles of dS and of elements by TMA where it can be. Elements then take no registers, and wide
    heads have those of other scores."""
    gradient, elements = next(iter(attn_bwd_captured.arrays_with_ds_gradient(op)), ""), elements_by_tma(op.forward, op.layout)[0]
    if elements and (config.producer_registers, config.consumer_registers) == (24, 240):
        config = dataclasses.replace(config, producer_registers=40, consumer_registers=232)
    return dataclasses.replace(config, gradient=gradient, elements=elements)


def _weight_of(op: Forward) -> Option:
    """The option for dropout: of weights as they are packed, or, where sequences are parts of longer ones, one by one."""
    return weight.PackedDropout(op.spec.dropout) if op.spec.dropout and op.spec.offsets is None else op.spec.weight


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
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(op.forward, WIDEST_HEAD)
        forward = op.forward
        if (columns := forward.head_dim + forward.head_dim_v) > WIDEST_PAIR:
            reasons.append(f"head_dim and head_dim_v are {columns} together; it takes up to {WIDEST_PAIR}")
        if forward.widest > WIDEST and not _is_plain(forward):
            reasons.append(
                f"with heads above {WIDEST} columns it takes no list of tiles, and weights and scores that nothing changes"
            )
        return reasons + backward.reasons(op, 64, 128, places=2) + tiling.reasons(self.layout_reason(op.layout))

    def prefers(self, op: Backward, device: Device) -> bool:
        """Not heads above 128 columns which nobody has timed here, with one place of Q in shared memory; nor where what loads
        spills much, as for sequences that use a part of their rows, and packed ones under other masks than a causal one."""
        forward = op.forward
        if forward.widest <= WIDEST:
            return True
        is_timed = wide_config_of(forward).q_stages > 1
        masks = (Full, Causal) if forward.varlen else (Full, Causal, Window, And)
        return is_timed and isinstance(forward.mask, masks) and not any(forward.lens)

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
        if reason := _refuse_wide(config, forward):
            return reason
        if config.store not in STORES or config.direction not in ("", *DIRECTIONS):
            return (
                f"store is {config.store!r} and direction {config.direction!r}; they must be of {[*STORES]} and {[*DIRECTIONS]}"
            )
        if config.order not in ORDERS:
            return f"order is {config.order!r}; it must be of {[*ORDERS]}"
        plain = forward.has_plain_score and not forward.spec.dropout
        if config.order != "at_once" and (config.dq_parts == 1 or not plain):
            return (
                f"order is {config.order!r}; it needs a part of dq for each of its makers, and scores and weights that nothing "
                "changes"
            )
        if config.steps not in STEPS:
            return f"steps is {config.steps!r}; it must be of {[*STEPS]}"
        if config.steps == "apart" and config.order == "step_later" and not lists(forward.mask):
            return "steps is 'apart'; it needs order 'at_once' or 'dp_later', or a mask whose tiles are lists"
        if config.steps == "apart" and config.elements and not lists(forward.mask):
            return "steps is 'apart' and elements come by TMA; tiles that are skipped would take their place before they come"
        is_taken = lists(forward.mask) or (config.gradient and not isinstance(forward.mask, Full))
        if config.dq_chains == 3 and is_taken:
            return "dq_chains is 3; no warp is left for a mask whose tiles are lists, or for the zeros of one that skips tiles"
        if config.store == "unordered" and forward.spec.deterministic:
            return "store is 'unordered', whose last bits vary from run to run; it needs deterministic=False"
        if config.turns and forward.keys is None:
            return f"turns is {config.turns!r}; it must be '', but over lists of blocks"
        if reason := _refuse_tiles(config, op) or attn_bwd_works.wrong(op, config):
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
        elif forward.widest > WIDEST:
            configs = [wide_config_of(forward)]
        else:
            configs = [config_of(forward), config_of(forward, "final"), *later_configs_of(forward), *small_configs_of(forward)]
        return [config for config in map(functools.partial(_use_tma, op), configs) if self.legal(config, op, device) is None]

    def cost(self, config: AttnBwdConfig, op: Backward, device: Device) -> float:
        """The time of the products at the full rate of the tensor cores, a lower bound, by how dq is finished and made.

        Where few key tiles add to a tile of dq, the last of them finishes it best, else a pass of its own; and then dq is better
        made a step later (notes/attn_bwd.md). Where tiles are lists, or keys are intervals of arrays, only the device knows how
        many key tiles add: few are expected, whatever the length."""
        forward, seconds = op.forward, tiling.least_seconds(op.flops, device)
        if lists(forward.mask) and (config.store == "final" or config.steps == "apart"):
            return seconds * (0.9 if config.store == "final" else 0.97)
        if config.store != "final":
            return seconds * (0.98 if config.order == "step_later" else self._idle(config, forward, device))
        has_few = is_interval(forward.mask) or attn_bwd_works.count_kept_keys(forward) <= FINAL_KEYS[forward.widest <= 64]
        return seconds * (0.95 if has_few and not attn_bwd_works.needs_bands(op, config, device.sm_count) else 1.05)

    def _idle(self, config: AttnBwdConfig, op: Forward, device: Device) -> float:
        """The factor by which tiles of so many keys take longer, where there are other sizes: 192 where not every block has a
        work, and 128 else; of works that are alike, or half as long on average, those that end first (perf/notes/attn_bwd.md)."""
        small, large = (backward.kv_tiles(op, tile_kv) / device.sm_count for tile_kv in (128, 192))
        if isinstance(op.mask, Full):
            is_small = math.ceil(small) < LARGE_WORK * math.ceil(large)
        else:
            is_small = max(1, small / 2) < LARGE_WORK * max(1, large / 2) if isinstance(op.mask, Causal) else small <= 1
            if attn_bwd_works.suits_bands(op, 192, device.sm_count):
                is_small = small <= 1
        return 1.0 if config.consumers == (2 if is_small else 3) or not small_configs_of(op) else 1.02

    def programs(self, op: Backward, config: AttnBwdConfig, device: Device) -> tuple[Program, ...]:
        """Those of all works that lengths may ask for."""
        kinds = attn_bwd_works.kinds(op, config)
        return tuple(program for kind in kinds for program in super(AttnBwd, self).programs(op, kind, device))

    def resolved(self, op: Backward, config: AttnBwdConfig, device: Device) -> AttnBwdConfig:
        """The configuration with what sizes suggest where it says nothing: sums of dq, parts of heads, walk and direction."""
        return attn_bwd_works.resolved(op, config, device.sm_count)

    def lower(self, op: Backward, config: AttnBwdConfig, device: Device) -> Program:
        forward, works = op.forward, backward.kv_tiles(op.forward, config.tile_kv)
        config = self.resolved(op, config, device)
        kv_values = backward.values(forward, config.tile_q, config.tile_kv)
        parts = config.parts * config.query_parts
        blocks = forward.heads * backward.q_blocks(forward, config.tile_q)
        grid = min(device.sm_count, works * parts) if forward.total_kv else 0
        kv_values |= attn_bwd_works.values(forward, config, device.sm_count, grid)
        launches = attn_bwd_captured.cleared_for_ds(self, op, device, config.gradient) if config.gradient else []
        main = functools.partial(_render_main, _choose_ds_store(op, config), _choose_elements(op, config))
        several = {name: min(getattr(config, name), 2) for name in ("dq_sums", "query_parts", "bundle")} | {"heads_together": 0}
        of_source = dataclasses.replace(group.source_of(config), **several)
        launches += [self.launch(op, of_source, device, "attn_bwd", kv_values, grid, main)]
        launches += self.add_parts(op, parts, device)
        if config.store != "final" and forward.total_q:
            chains = config.dq_chains if config.store == "ordered" else 0
            sizes = (config.dq_columns, config.dq_parts) if not _shares_panel(config) else (2 * config.dq_columns, 1)
            last = ConvertPass(config.tile_q, config.tile_kv, *sizes, dq_chains=chains)
            of_list = gradients.ListSums() if lists(forward.mask) else gradients.IntervalSums()
            sums = gradients.BandSums() if config.walk == "bands" else of_list
            last = dataclasses.replace(last, sum=sums if config.dq_sums > 1 else backward.ONE_SUM)
            launches.append(self.convert(op, last, device))
        blocks *= config.dq_sums
        scratch = [Buffer("dq_sum", blocks * config.tile_q * config.dq_columns * config.dq_parts * 4)]
        scratch += [Buffer("turns", blocks * config.dq_chains * 4)] * (config.store != "unordered")
        cleared = gradients.ClearListTurnsDq() if config.store == "final" and lists(forward.mask) else _store_of(config)[1]
        dq = tuple((name, getattr(config, name)) for name in ("dq_parts", "dq_columns", "dq_chains"))
        first = DeltaPass(config.tile_q, config.tile_kv, 8, cleared, dq, ORDERS[config.order][1])
        scratch += backward.part_buffers(forward, parts)
        program = self.program(op, device, first, launches, make_launches, (*scratch,), config.gradient)
        of_sums = {"dq_sums": config.dq_sums, "sum_tiles": blocks // config.dq_sums} | attn_bwd_works.band_values(forward, config)
        return program.with_values(of_sums if config.dq_sums > 1 else {})


def _render_main(ds: Option, elements: Option, op: Forward, config: AttnBwdConfig, arch: str) -> tuple[Source, Fields]:
    numbers = {name: value for name, value in dataclasses.asdict(config).items() if isinstance(value, int)}
    parts = numbers.pop("parts") * numbers.pop("query_parts")
    del numbers["dq_sums"], numbers["bundle"], numbers["heads_together"]
    constants = {**numbers, "tile_kv": config.tile_kv, "q_block": config.tile_q}
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
    shares = _shares_panel(config)
    of_dq = (("DqMma", 64), ("DqHalfMma", config.dq_columns - 64)) if shares else (("DqMma", config.dq_columns),)
    products = [
        wgmma("SMma", op.element, config.tile_q, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
        wgmma("DpMma", op.element, config.tile_q, a_in_registers=False, b_by_rows=False),
        wgmma("DvMma", op.element, op.head_dim_v, a_in_registers=True, b_by_rows=True),
        wgmma("DkMma", op.element, op.head_dim, a_in_registers=True, b_by_rows=True),
        *(wgmma(name, op.element, n, a_in_registers=False, b_by_rows=True) for name, n in of_dq),
    ]
    walk: Option = QListWalk(config.store != "unordered", config.store == "final") if lists(op.mask) else group.WALKS[config.walk]
    if op.spec.keys is not None:
        walk = (QBlockWalkByTime if config.turns else QBlockWalk)(op.spec.keys.block_q)
    rotated, in_bands, of_part = config.walk == "rotated", config.walk == "bands", config.query_parts > 1
    if of_part and not in_bands:
        walk = QIntervalPart()
    elif rotated and op.varlen:
        walk = QIntervalRotatedPacked()
    draw = "StaticPersistent" if rotated or config.turns else "DynamicPersistent"
    plan = backward.kv_scheduler(op, "Ascending" if rotated else config.direction, draw)
    if in_bands:
        plan = scheduler.KvBands("Alternating")
    elif op.varlen and (rotated or config.bundle):
        plan = scheduler.KvWindows(draw="StaticPersistent") if rotated else scheduler.KvBundles()
    every = backward.options(
        op, Score=backward.exact_score(op), Weight=_weight_of(op), **backward.dkv_rows(parts),
        Scheduler=plan, Turn=RotatedTurn() if rotated else backward.turn(op), Walk=walk,
        DqStore=_store_of(config)[0], Statistics=ORDERS[config.order][1], DsStore=ds, Elements=elements,
        StepOrder=ORDERS[config.order][0],
        DqShare=gradients.PartsOfSharedPanel() if shares else gradients.PartsOfPanels(),
        Steps=_loops_of(op, config),
    )  # fmt: skip
    loads = backward.loads(op, config.tile_q, config.tile_kv)
    fields = (*loads, *every["Group"].fields, gradients.DQ, *backward.STATISTICS, *backward.HEADS)
    return backward.rendered("attn_bwd.cu", constants, fields, products, every, arch)


def _loops_of(op: Forward, config: AttnBwdConfig) -> Option:
    """The option for how a block goes over the steps of a work."""
    if op.keys is not None:
        return gradients.MemberLoops()
    return gradients.OneLoop() if config.steps == "together" else gradients.TwoLoops(lists(op.mask))


ATTN_BWD = AttnBwd()
