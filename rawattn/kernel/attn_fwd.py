"""attn_fwd.cu: forward attention with many query rows on Hopper."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import Forward
from ..operation.base import queries_in_steps
from ..operation.operand import Layout
from ..variant import Option, kv, rows, scheduler, softmax, store
from ..variant.ahead import ahead_by_tiles, bytes_in_smem
from ..variant.element import BF16, FP32
from ..variant.field import Field, Fields, PackedHeads, PageRows, TensorMap
from ..variant.mask import Full
from ..variant.walk import IntervalWalk, ListWalk, lists
from . import combine, few_rows, tiling
from .attn_fwd_mma import ATTN_FWD_MMA
from .base import ForwardKernel
from .program import Program
from .render import config_header, source, wgmma
from .tiling import kept_keys, tiles

FILE = "attn_fwd.cu"
SMALL_SPILL = 16  # bytes of a thread: what was measured
# Clocks of a multiprocessor, fitted to timings on an H200 (perf/notes/attn_fwd.md).
_CLOCK = 1.755e9  # per second
_LAUNCH = 1.9e-6  # seconds
_OVERLAP = {1: 9.0, 2: 1.3, 3: 1.62, 4: 1.85}  # of products and exponentials, by warpgroups: 1 is none, infinity complete
_STEP = 30.0  # what else a step of one takes from the others
_STEP_OF_LIST = 40.0  # ... and where its tile was read from a list; guessed
_ALONE, _ALONE_PER_KEY = 150.0, 3.7  # what a step takes one warpgroup besides its products, whatever the others do
_IDLE = 0.25  # of the time of a block, were all its warpgroups without rows: less overlaps then; guessed
_WORK, _WORK_PER_COLUMN = 2660.0, 7.75  # first and last step of a query tile, and its store


@dataclasses.dataclass(frozen=True)
class AttnFwdConfig:
    """The configuration of attn_fwd.cu."""

    tile_q: int = 128
    tile_kv: int = 128
    stages: int = 2  # of the rings of K and V
    q_stages: int = 1
    # For few rows: whether the query heads that share a key head share tiles, as over caches they do where they can, and the
    # splits of each tile's keys at most, 0 for as many as the sizes suggest. A search leaves both as they are.
    pack_gqa: bool = dataclasses.field(default=False, metadata={"is_fixed": True})
    kv_splits: int = dataclasses.field(default=1, metadata={"is_fixed": True})
    ctas_per_sm: int = dataclasses.field(default=1, metadata={"is_fixed": True})  # blocks that share a multiprocessor

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, 64 query rows each."""
        return self.tile_q // 64


# Registers of a producer thread and of a consumer thread where blocks share a multiprocessor, by consumer warpgroups and blocks.
_TOGETHER = {(1, 2): (40, 216), (1, 3): (32, 128), (2, 2): (32, 104)}


def registers(config: AttnFwdConfig, op: Forward) -> tuple[int, int]:
    """Registers of a producer thread and of a consumer thread. A block has 65,536 in all; each warpgroup starts with an equal
    part of them (multiples of 8), and what the producer gives up the consumers take. A producer that asks a mask for its tiles,
    or reads lists of them, needs more, and so do consumers whose score is a function."""
    if config.ctas_per_sm > 1:
        return _TOGETHER[config.consumers, config.ctas_per_sm]
    if lists(op.mask) or op.keys is not None:
        return {1: (128, 256), 2: (72, 216), 3: (56, 152), 4: (32, 112)}[config.consumers]
    wide = config.tile_kv > 112 or op.score.is_function or op.spec.dropout
    return {1: (56, 256), 2: (40, 232), 3: (32, 160) if wide else (40, 152), 4: (32, 112)}[config.consumers]


def ahead_of(op: Forward, config: AttnFwdConfig) -> Option:
    """The option for which elements of the score's arrays come before the score asks for them."""
    return ahead_by_tiles(op.score, op.layout.tma_captured, config.tile_q, config.tile_kv)


def panels(columns: int) -> int:
    """Panels of 64 columns that a tile row takes in shared memory."""
    return -(-columns // 64)


def smem_bytes(config: AttnFwdConfig, op: Forward) -> int:
    """Shared memory of a block, at most: tiles, elements ahead, columns of a mask, barriers (8 bytes each) and two works."""
    q = config.q_stages * config.tile_q * panels(op.head_dim)
    kv_rows = config.stages * config.tile_kv
    tiles = 128 * (q + kv_rows * (panels(op.head_dim) + panels(op.head_dim_v)))
    ahead = bytes_in_smem(ahead_of(op, config), config.tile_q, config.tile_kv, config.stages)
    barriers = 8 * (2 * config.q_stages + 4 * config.stages + 4) + 24
    columns = kv_rows * getattr(op.mask, "column_bytes", 0)
    return -(-(tiles + ahead + columns + barriers) // 1024) * 1024


def accumulators(config: AttnFwdConfig, op: Forward) -> int:
    """Registers of a consumer thread that hold S, P and O, and what a score and dropout work with besides."""
    tight = config.tile_kv > 64 if config.consumers == 3 else config.consumers == 4 and op.varlen  # found by trying
    score = 13 if tight and not op.has_plain_score else 0
    weight = 8 if op.spec.dropout and config.consumers > 2 and (op.varlen or op.spec.offsets is not None) else 0
    weight += {1: 40, 2: 8}[config.consumers] if op.spec.dropout and config.ctas_per_sm == 2 else 0
    return config.tile_kv // 2 + config.tile_kv // 4 + op.head_dim_v // 2 + score + weight


def makespan(work: npt.NDArray[np.float64], count: int, workers: int, drawn: bool = False) -> float:
    """The time in which ``workers`` end ``count`` works, taken one by one, the longest first, or as they are ``drawn``: the last
    tiles of queries first, of which the very last may have few rows. ``work`` samples their times."""
    if count > 8 * workers:
        return float(work.mean()) * (count / workers + 0.5)
    works = work[::-1][np.arange(count) * len(work) // count] if drawn else np.sort(np.resize(work, count))[::-1]
    busy = works[:workers].tolist()  # the first of each
    heapq.heapify(busy)
    for seconds in works[workers:].tolist():
        heapq.heapreplace(busy, busy[0] + seconds)
    return max(busy, default=0.0)


def rendered(op: Forward, config: AttnFwdConfig, arch: str, fields: Fields, options: dict[str, Option]) -> Source:
    """The source of a configuration with these ``fields`` and ``options``."""
    producer, consumer = registers(config, op)
    constants = {**dataclasses.asdict(config), "consumers": config.consumers, "producer_registers": producer}
    del constants["pack_gqa"], constants["kv_splits"]
    constants |= {"consumer_registers": consumer, "m_tiles_per_warp": 1}
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v}
    products = [
        wgmma("QkMma", op.element, config.tile_kv, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
        wgmma("PvMma", op.element, op.head_dim_v, a_in_registers=True, b_by_rows=True),
    ]
    return source(FILE, config_header(constants, fields, products, options), arch)


def _count_keys(config: AttnFwdConfig) -> int:
    """The keys that a ring holds, as far as more of them are of use: two stages of Q are worth less than these keys."""
    return min(config.stages * config.tile_kv, 192)


def packed(op: Forward, config: AttnFwdConfig) -> Forward:
    """The operation whose queries and heads are the rows of tiles."""
    return op.packed if config.pack_gqa else op


def unnumbered(config: AttnFwdConfig, splits: int) -> AttnFwdConfig:
    """The configuration that is rendered for so many splits: all numbers of them above one share a source."""
    return dataclasses.replace(config, kv_splits=min(splits, 2))


def split_tiles(op: Forward, config: AttnFwdConfig) -> int:
    """The fewest key tiles of a split: of few rows splits follow from what the sequence visits, whatever the batch is."""
    return few_rows.SPLIT_KEYS // config.tile_kv if config.kv_splits == 0 and few_rows.are_few(op) else 1


def split_reasons(op: Forward, config: AttnFwdConfig) -> list[str]:
    """The reasons why keys are not split so, or heads do not share tiles."""
    refusals, heads = [], op.heads_per_kv
    if not 0 <= config.kv_splits <= few_rows.MOST:
        refusals.append(f"kv_splits is {config.kv_splits}; it must be from 0 to {few_rows.MOST}")
    if config.kv_splits != 1 and not few_rows.may_split(op):
        where = "packed sequences, functions, masks with holes and invariant calls"
        refusals.append(f"kv_splits is {config.kv_splits}; it must be 1 for {where}")
    others = not few_rows.may_split(op) or op.q_lens or op.layout.repeats_heads
    if config.pack_gqa and (others or heads == 1 or config.tile_q % heads):
        needs = f"several query heads for each key head, a divisor of {config.tile_q}"
        refusals.append(f"pack_gqa is True; it needs {needs}, and dense sequences without q_lens and functions")
    return refusals


def sharing_reasons(op: Forward, config: AttnFwdConfig) -> list[str]:
    """The reasons why blocks do not share a multiprocessor so. Threads begin with few registers then, and ptxas wants as many for
    the sums of a product and 30 besides."""
    count, most = config.ctas_per_sm, max(op.head_dim_v, config.tile_kv)
    if count == 1:
        return []
    if (config.consumers, count) not in _TOGETHER:
        return [f"ctas_per_sm is {count}; it must be 1, or 2 or 3 where tile_q is 64, or 2 where it is 128"]
    if op.mask.is_function or op.score.is_function or lists(op.mask):
        return [f"ctas_per_sm is {count}; it must be 1 for functions and masks with holes"]
    widest = 2 * (65536 // (128 * (1 + config.consumers) * count) // 8 * 8 - 30)
    return [f"ctas_per_sm is {count}; tile_kv and head_dim_v must be up to {widest} then, and are up to {most}"] * (most > widest)


def unshifted(op: Forward, config: AttnFwdConfig) -> Option | None:
    """The score for weights without a reference, None where they have one: they may be as far from 1 as bf16 allows, and time
    depends on data. Splits, tiles that heads share and blocks that share a multiprocessor were not timed so."""
    is_timed = not config.pack_gqa and config.kv_splits == config.ctas_per_sm == 1
    return op.spec.placed_score.unshifted if is_timed and op.element == BF16 and not op.spec.data_independent else None


def is_short(op: Forward) -> bool:
    """Says whether sequences are one or two tiles of 64 rows, and so many that blocks which share a multiprocessor have several
    each. What has few rows gets the same configuration in any batch. Of wide heads under a built-in mask four tiles are short,
    too: of two tiles of 192 rows the second would be one warpgroup's."""
    wide = 64 < op.widest <= 128 and not isinstance(op.mask, Full)
    most = 256 if wide and op.q_len > 192 and not ATTN_FWD.is_tried(op) else 128
    fits = 32 < op.q_len <= most and op.kv_len <= most and not (op.varlen or op.invariant)
    return fits and (tiling.is_few(op) or tiles(op, 64) >= 2048)


def short_configs(op: Forward) -> list[AttnFwdConfig]:
    """The configuration that was fastest for them on an H200 (perf/notes/attn_fwd.md, "Short calls")."""
    if op.q_len > 64 and 64 < op.widest <= 128:
        return [AttnFwdConfig(128, 64, 5, 2)] * (not ATTN_FWD.is_tried(op))
    if op.widest <= 64:
        return [AttnFwdConfig(64, 64, 4, 1, ctas_per_sm=3) if op.q_len <= 64 else AttnFwdConfig(128, 48, 6, 2, ctas_per_sm=2)]
    return [AttnFwdConfig(64, 64, 3, 1, ctas_per_sm=2)] * (op.widest <= 128 and op.q_len <= 64)


def _is_cut(op: Forward) -> bool:
    """Says whether dense sequences end before their rows of k and v do: a map of such tensors knows one end for all of them."""
    return op.kv_lens and not op.varlen


class AttnFwd(ForwardKernel):
    """The kernel and its cost model."""

    name = "attn_fwd"
    needs = "a Hopper GPU (compute capability 9.0)"
    file = FILE
    places_back = 2.5  # behind attn_fwd_mma
    config_type = AttnFwdConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: Forward, device: Device) -> bool:
        """Says whether it is made for the operation: not for float32 and wider heads, which attn_fwd_mma takes."""
        return self.runs_on(device) and op.element != FP32 and op.widest <= 256

    def prefers(self, op: Forward, device: Device) -> bool:
        serves_few = few_rows.are_few(op) or (is_short(op) and op.widest <= 128)
        many = not tiling.is_few(op) or (serves_few and op.layout.tma_unsupported is None)
        if op.invariant or not many:  # attn_fwd_mma has more blocks, and shares tiles among heads
            return op.invariant
        return op.varlen or few_rows.may_share(op) or not few_rows.is_outrun(self, ATTN_FWD_MMA, op, device)

    def supports(self, op: Forward, device: Device) -> list[str]:
        reasons = self.device_reasons(device) + tiling.tensor_core_reasons(op)
        reasons += tiling.too_many_tiles(op, 64) + tiling.function_reasons(op)
        return reasons + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.tma_unsupported

    def legal(self, config: AttnFwdConfig, op: Forward, device: Device) -> str | None:
        if config.tile_q not in (64, 128, 192, 256):
            return f"tile_q is {config.tile_q}; it must be 64, 128, 192 or 256"
        if reasons := split_reasons(op, config) + sharing_reasons(op, config) + tiling.too_many_tiles(op, config.tile_q):
            return reasons[0]
        if config.tile_kv % 16 or not 32 <= config.tile_kv <= 256:
            return f"tile_kv is {config.tile_kv}; it must be a multiple of 16 from 32 to 256"
        if config.stages < 2 or config.q_stages not in (1, 2):
            return f"stages is {config.stages} and q_stages {config.q_stages}; they must be at least 2, and 1 or 2"
        smem = smem_bytes(config, op)
        if reason := tiling.too_large_block(smem, device) or tiling.too_much_smem(smem, config.ctas_per_sm, device):
            return reason
        if config.consumers == 3 and config.tile_kv > 128:
            return f"tile_kv is {config.tile_kv}; with three consumer warpgroups it spills above 128"
        limit = {256: 208, 232: 200, 216: 184, 160: 128, 152: 120, 128: 92, 112: 80, 104: 72}[registers(config, op)[1]]
        if accumulators(config, op) > limit:
            return f"its accumulators take {accumulators(config, op)} registers of a thread; above {limit} it spills"
        return None

    def small_spill(self, op: Forward) -> int:
        """The bytes for scores, 16: a table of biases by distance takes 1409 us in 192 x 64, which spills 16, and 1505 in
        128 x 96, which spills none (perf/notes/functions.md). Nobody measured lists, where the producer may be what spills."""
        return 0 if lists(op.mask) else SMALL_SPILL

    def candidates(self, op: Forward, device: Device) -> list[AttnFwdConfig]:
        """The legal configurations worth a thought: the deepest rings that fit, key tiles of 64 to 128 rows where
        there are any (longer ones lost wherever they were tried). Where only compiling tells which of them are good, there is one
        ring for each tile; and where the producer asks a mask for its tiles there are up to three warpgroups, which leave it
        registers, and the shortest and the longest key tile of each. Three have rows of several blocks of queries, of which each
        may need other keys."""
        short = [config for config in short_configs(op) if is_short(op) and self.legal(config, op, device) is None]
        return short or self.candidates_of_one(op, device)

    def candidates_of_one(self, op: Forward, device: Device) -> list[AttnFwdConfig]:
        """Those with one block on a multiprocessor."""
        configs: list[AttnFwdConfig] = []
        most = 256 if not lists(op.mask) else 128 if getattr(op.mask, "by_blocks", False) else 192
        for tile_q in range(64, most + 1, 64):
            tiles = [self._find_deepest(tile_q, tile_kv, op, device) for tile_kv in range(32, 129, 16)]
            tiles = [rings for rings in tiles if rings]
            if lists(op.mask):
                tiles = [rings for rings in tiles if rings[0].tile_kv >= 64] or tiles
                tiles = tiles[:1] + tiles[1:][-1:]
            configs += itertools.chain(*([max(rings, key=_count_keys)] if self.is_tried(op) else rings for rings in tiles))
        configs = [c for c in configs if c.tile_kv >= 64] or configs
        if few_rows.are_uneven(op):
            return [dataclasses.replace(c, kv_splits=splits) for c in configs for splits in few_rows.splits_of(op, c)]
        if not few_rows.are_sparse(op):
            return configs
        most, heads = few_rows.most_rows(op), op.heads_per_kv if few_rows.share(op) else 1
        configs = [c for c in configs if c.tile_q <= most and c.tile_q % heads == 0]
        return [dataclasses.replace(c, pack_gqa=heads > 1, kv_splits=0) for c in configs]

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        if few_rows.are_sparse(op):
            return few_rows.tuning_shapes(op, few_rows.share(op))
        if few_rows.are_uneven(op):
            return few_rows.uneven_shapes(op)
        shapes = super().tuning_shapes(op)
        if not is_short(op):
            return shapes
        n = next(n for n in (64, 128, 256) if op.q_len <= n)
        return (dataclasses.replace(shapes[0], batch=256, q_len=n, kv_len=n, total_q=256 * n, total_kv=256 * n),)

    def _find_deepest(self, tile_q: int, tile_kv: int, op: Forward, device: Device) -> list[AttnFwdConfig]:
        """The configurations of a tile with the deepest rings that fit, with two stages of Q and with one."""
        configs = []
        for q_stages in (2, 1):
            fitting = [AttnFwdConfig(tile_q, tile_kv, stages, q_stages) for stages in (8, 6, 5, 4, 3, 2)]
            configs += [c for c in fitting if self.legal(c, op, device) is None][:1]
        return configs

    def cost(self, config: AttnFwdConfig, op: Forward, device: Device) -> float:
        if config.kv_splits == 1 and not config.pack_gqa:
            return self.seconds(config, op, device)
        sharing = few_rows.SHARING if config.pack_gqa and few_rows.may_be_own(op) else 1.0
        return sharing * self.seconds_of_few(config, op, device, op.heads_per_kv if config.pack_gqa else 1)

    def seconds_of_few(self, config: AttnFwdConfig, op: Forward, device: Device, rows_each: int) -> float:
        """The same for few queries over many keys, which must be read, in as many splits as the configuration or the sizes say,
        and the fold of these."""
        return _of_splits(config, op, device, rows_each)[0]

    def count_splits(self, config: AttnFwdConfig, op: Forward, device: Device, rows_each: int) -> int:
        """The splits of each tile's keys at most; for all numbers of queries that are rounded alike as many."""
        if (tiles_each := split_tiles(op, config)) > 1:
            begin, end = kept_keys(op.spec.placed_mask, op.q_len, op.kv_len, config.tile_q, rows_each)
            visited = int((-(-end.max(1) // config.tile_kv) - begin.min(1) // config.tile_kv).max())
            most = few_rows.most_parts(op)
            return min(most, max(1, (visited + 1) // tiles_each))  # one more: where tiles begin the device knows
        q_len = queries_in_steps(op.batch, op.q_len, op.heads, op.kv_heads)
        op = op if op.varlen or q_len == op.q_len else op.resized(op.batch, q_len, op.kv_len, op.spec.offsets)
        count = 1 if config.kv_splits == 1 else _of_splits(config, op, device, rows_each)[1]
        return count if tiling.tiles(op, config.tile_q, rows_each) * count <= tiling.MOST_TILES else 1

    def seconds(self, config: AttnFwdConfig, op: Forward, device: Device, rows_each: int = 1, splits: int = 1) -> float:
        """Counts for every query tile the clocks of its steps over key tiles, at the rate of the tensor cores (4096 FLOP a clock)
        and the exponentials (16 a clock), and what a tile costs besides. ``rows_each`` heads share a tile, and its keys are in
        ``splits`` works."""
        columns = -(-op.head_dim // 16) * 16 + op.head_dim_v
        products, exponentials = 64 * config.tile_kv * columns / 2048, 4 * config.tile_kv  # of 64 rows by one key tile
        overlap = _OVERLAP[config.consumers]
        strip = (products**overlap + exponentials**overlap) ** (1 / overlap) + _STEP + _STEP_OF_LIST * lists(op.mask)
        alone = products + _ALONE_PER_KEY * config.tile_kv + _ALONE
        begin, end = kept_keys(op.spec.placed_mask, op.q_len, op.kv_len, config.tile_q, rows_each)
        strips = np.maximum(-(-end // config.tile_kv) - begin // config.tile_kv, 0)  # key tiles
        strips = -(-strips // splits)
        work = np.maximum(strips.sum(1) * strip, strips.max(1) * alone) + _WORK + _WORK_PER_COLUMN * op.head_dim_v
        count = tiles(op, config.tile_q, rows_each) * splits
        return makespan(work, count, device.sm_count, splits > 1) / _CLOCK + _LAUNCH  # fitted so for whole keys

    def options(self, op: Forward, config: AttnFwdConfig) -> dict[str, Option]:
        out = store.StoreOLse() if op.return_lse else store.StoreO()
        plan = tiling.lpt_scheduler(op, persistent=True)
        walk = ListWalk() if lists(op.mask) else IntervalWalk()
        changed: dict[str, Option] = {"Rows": rows.DenseSpan()} if _is_cut(op) else {}
        if config.pack_gqa:
            changed = tiling.packed_options(op, rows.TmaPackGqa(_is_cut(op)))
        if score := unshifted(op, config):
            changed |= {"Score": score, "Softmax": softmax.Unshifted()}
        if config.kv_splits != 1:
            changed |= few_rows.options(changed.get("Mask", op.mask))
            op = dataclasses.replace(op, sinks=False)  # which join where the splits are folded
        return tiling.options(op, **{
            "Ahead": ahead_of(op, config), "Softmax": softmax.SpeculativeMax(), "Kv": kv.TmaKv(), "Scheduler": plan, "Store": out,
            "Order": self.order(op, config), "Walk": walk, **changed,
        })  # fmt: skip

    def order(self, op: Forward, config: AttnFwdConfig) -> Option:
        """The order of the warpgroups' products. Two take turns, but at head_dim 256, where the products of one leave the other's
        softmax time enough; four do where none of them has tiles to skip, nor a softmax so long that it misses its turn
        (perf/notes/attn_fwd.md)."""
        even = isinstance(op.mask, Full) and op.has_plain_score and not op.varlen
        turns = {2: op.head_dim_v <= 128, 4: even}.get(config.consumers, False)
        return scheduler.PingPong() if turns else scheduler.Unordered()

    def fields(self, op: Forward, config: AttnFwdConfig) -> Fields:
        boxes = {"q": config.tile_q, "k": config.tile_kv, "v": config.tile_kv}
        ctype, fill = ("TmaPageRows", PageRows) if _is_cut(op) else ("TmaTensor", TensorMap)
        tensors = [Field(name, ctype, fill(name, box_rows)) for name, box_rows in boxes.items()]
        if config.pack_gqa:
            tensors[0] = Field("q", "TmaHeads", PackedHeads("q", config.tile_q, op.heads_per_kv))
        return tiling.fields(tensors, self.options(op, config))

    def render(self, op: Forward, config: AttnFwdConfig, arch: str) -> Source:
        return rendered(op, config, arch, self.fields(op, config), self.options(op, config))

    def values(self, op: Forward, config: AttnFwdConfig, device: Device) -> dict[str, float]:
        values = tiling.values(packed(op, config), config.tile_q, device)
        if score := unshifted(op, config):
            values |= score.values
        return values | {"q_len": op.q_len, "pack_gqa_heads": op.heads_per_kv} if config.pack_gqa else values

    def rendered_kind(self, op: Forward, config: AttnFwdConfig) -> tuple[Any, ...]:
        return *super().rendered_kind(op, config), config.pack_gqa and op.heads_per_kv

    def tiles(self, op: Forward, config: AttnFwdConfig, device: Device) -> tiling.QueryTiles:
        found = super().tiles(packed(op, config), config, device)._replace(most_blocks=device.sm_count * config.ctas_per_sm)
        return found._replace(rows_each=op.heads_per_kv) if config.pack_gqa else found

    def lower(self, op: Forward, config: AttnFwdConfig, device: Device) -> Program:
        return self._lower(op, config, device, self.count_splits(config, op, device, op.heads_per_kv if config.pack_gqa else 1))

    def _lower(self, op: Forward, config: AttnFwdConfig, device: Device, count: int) -> Program:
        """The program with so many splits."""
        whole = super().lower(op, unnumbered(config, count), device)
        if count == 1:
            return whole
        rows = queries_in_steps(op.batch, op.q_len, op.heads, op.kv_heads) * op.heads * op.batch
        rendered = self._keep(("fold", op.kind, device.arch), lambda: combine.source_and_fields(op, device.arch))
        tiles = self.tiles(op, config, device)._replace(splits=count)
        return combine.folded(whole, op, tiles, rows, rendered, {"split_tiles": split_tiles(op, config)})

    def programs(self, op: Forward, config: AttnFwdConfig, device: Device) -> tuple[Program, ...]:
        numbers = (1, 2) if config.kv_splits == 0 else (config.kv_splits,)
        return tuple(self._lower(op, config, device, n) for n in numbers)


@functools.lru_cache(maxsize=1024)
def _of_splits(config: AttnFwdConfig, op: Forward, device: Device, rows_each: int) -> tuple[float, int]:
    """The seconds in the best number of splits, or in that of the configuration, and this number."""
    begin, end = kept_keys(op.spec.placed_mask, op.q_len, op.kv_len, config.tile_q, rows_each)
    read = few_rows.read_seconds(op, int(end.max() - begin.min()))
    q_tiles = -(-op.q_len * rows_each // config.tile_q)
    idle = 1 - -(-op.q_len * rows_each // 64) / (config.consumers * q_tiles or 1)
    waves = tiles(op, config.tile_q, rows_each) / device.sm_count

    def seconds(n: int) -> float:
        is_fitted, again = op.widest <= few_rows.WIDEST and few_rows.are_sparse(op), 1.0
        computed = ATTN_FWD.seconds(config, op, device, rows_each, n) * (1 + (few_rows.IDLE if is_fitted else _IDLE) * idle)
        if is_fitted:
            computed *= few_rows.PAIR if config.consumers == 2 and op.widest > 80 else 1
            again = few_rows.readings(read, q_tiles, op.heads_per_kv // rows_each, waves * n if n > 1 else 1, device)
        return few_rows.overlap(computed, read * again) + few_rows.fold_seconds(op, n)

    numbers = (config.kv_splits,) if config.kv_splits else few_rows.numbers(op, -(-op.kv_len // config.tile_kv))
    return min((seconds(n), n) for n in numbers)


ATTN_FWD = AttnFwd()
