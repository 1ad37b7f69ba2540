"""attn_mla.cu: attention over latent caches, whose values are the first columns of their keys (MLA), on Hopper."""

from __future__ import annotations

import dataclasses

from ..array.tma import SWIZZLE_ROWS
from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache
from ..operation.kvcache import EVEN
from ..operation.operand import Layout
from ..variant import Option, kv, members, rows, scheduler, softmax, store
from ..variant.field import Field, Fields, PageBoxes, PagePool, PageRows, Scratch, View
from ..variant.walk import WorkIntervalWalk, lists
from . import attn_decode_fold, few_rows, paging, tiling
from .attn_decode import MOST_BLOCKS, ceil_div, most_rows
from .attn_decode_fold import LEFT_BYTES
from .attn_fwd_kvcache import page_rows
from .base import Kernel
from .paging import LONGEST
from .program import Buffer, Launch, Program
from .render import config_header, source, wgmma

FILE = "attn_mla.cu"
HEAD_DIM, HEAD_DIM_V = 576, 512
TILE_ROWS, TILE_KV = 64, 64
SMEM_BYTES = 232448  # all that a block of Hopper may have
REGISTERS = {"weigher_registers": 184, "summer_registers": 160}
MOST_ROWS = 1 << 20  # of a sequence
MOST_BYTES = 300_000_000  # of what blocks leave, on a stream: states of splits
SHARE_BYTES = 128  # of what a block keeps of its share
_START, _FOLD = 8e-6, 3e-6  # seconds; guessed


@dataclasses.dataclass(frozen=True)
class AttnMlaConfig:
    """The configuration of attn_mla.cu."""

    members: int = 1  # blocks that share keys, 64 rows each
    go_after: int = 7  # panels of Q K^T, of nine, after which P V of the tile before may begin
    cluster: bool = False  # whether they are a cluster, each of which brings a part of a tile to all

    @property
    def tile_q(self) -> int:
        return TILE_ROWS * self.members

    @property
    def tile_kv(self) -> int:
        return TILE_KV


def is_even(op: AttentionKVCache) -> bool:
    """Says whether keys are cut anywhere, so that bits follow from the batch."""
    return op.split_keys == EVEN


def rows_that_matter(op: AttentionKVCache) -> int:
    """The rows by which a sequence's splits are chosen: those of the bound, or of one query where nothing may follow from it."""
    return op.heads_per_kv if op.spec.invariant else most_rows(op)


def split_rule(op: AttentionKVCache) -> tuple[int, int]:
    """The fewest keys of a split and the most splits, powers of two, by the model and the most rows: never by the batch. Up to 64
    rows a block waits for memory, and has time to fold; of more, each border costs 5 us and more, so sequences up to
    ``long_keys`` have few, and longer ones as many as one alone needs (perf/notes/attn_mla.md)."""
    if is_even(op):
        return TILE_KV, 1 << 30
    rows = rows_that_matter(op)
    if rows > TILE_ROWS:
        keys, most = 4096, 32
    else:
        keys, most = 512, 16 if op.spec.invariant or rows > 32 else 64 if rows <= 16 else 32
    return (min(op.split_keys, LONGEST + 1) if op.split_keys > 0 else keys), most


def long_keys(op: AttentionKVCache) -> int:
    """The keys above which splits of a sequence are a quarter as long."""
    return 16384 if op.split_keys == 0 and rows_that_matter(op) > TILE_ROWS else LONGEST


def most_splits(op: AttentionKVCache) -> int:
    """The most splits that a sequence has."""
    keys, most = split_rule(op)
    return min(most, ceil_div(max(1, op.kv_len), 1 << keys.bit_length() - 1 - 2 * (op.kv_len > long_keys(op))))


def slots(op: AttentionKVCache) -> int:
    """States that are left at the border between two blocks. Of a work with one border the block that has more splits folds them
    itself, and the other one leaves half of all at most; a work with more borders has the places of all. Of even shares two."""
    return 2 if is_even(op) else most_splits(op) // 2 + 1


def strips(op: AttentionKVCache, config: AttnMlaConfig) -> int:
    """Runs of 16 rows that a work has at most."""
    return min(config.tile_q, 16 * ceil_div(max(1, most_rows(op)), 16)) // 16


def kv_option(pages: Option, rows: int, cluster: bool) -> Option:
    """The option for pages of which TMA reads so many rows at once."""
    if cluster:
        return kv.LatentSharedPanelsKv(pages, rows)
    return kv.LatentPanelsKv(pages, rows) if rows == TILE_KV else kv.LatentBoxesKv(pages, rows)


def gathered_option(op: AttentionKVCache, source: Option, cluster: bool) -> Option:
    """The option for keys that threads ask for row by row; ``source`` says where they lie."""
    if cluster:
        return kv.LatentSharedRecordsKv(source)
    return (kv.LatentRecordsKv if paging.has_records(op) else kv.LatentRowsKv)(source)


STRIP_BYTES = 64 * HEAD_DIM_V + 128  # of a state's sixteen rows


class AttnMla(Kernel[AttentionKVCache]):
    """The kernel; its configuration follows from the sizes."""

    name = "attn_mla"
    needs = "a Hopper GPU (compute capability 9.0)"
    config_type = AttnMlaConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def meant_for(self, op: AttentionKVCache, device: Device) -> bool:
        return False

    def gathers(self, op: AttentionKVCache) -> bool:
        """Says whether threads ask for keys row by row, wherever they lie."""
        return paging.has_tiny_pages(op) or paging.has_records(op)

    def step(self, op: AttentionKVCache) -> AttentionKVCache:
        """The step whose sequences are works."""
        return op

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = self.device_reasons(device)
        if not op.latent or op.kv_heads != 1 or (op.head_dim, op.head_dim_v) != (HEAD_DIM, HEAD_DIM_V):
            reasons.append(
                f"it takes latent caches, whose v is the first {HEAD_DIM_V} columns of a k of {HEAD_DIM} with one head"
            )
        if op.kv_element != op.element and not paging.has_records(op):
            reasons.append(f"it takes caches in the format of q, {op.element.name}, and of records")
        rows = most_rows(self.step(op))
        reasons += tiling.tensor_core_reasons(paging.over_tensors(self.step(op)), max(op.head_dim, HEAD_DIM))
        if rows > MOST_ROWS:
            reasons.append(f"a sequence may have {rows} rows; it takes up to {MOST_ROWS}")
        if op.pages == 0:
            reasons.append("the cache has no pages")
        if paging.has_functions(op) or lists(op.mask) or op.mask.of_head is not None:
            reasons.append("its mask or its score is a function, or the mask has holes or differs by head")
        return reasons + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.unaligned or layout.tma_unsupported

    def legal(self, config: AttnMlaConfig, op: AttentionKVCache, device: Device) -> str | None:
        if config.members not in (1, 2) or not 5 <= config.go_after <= HEAD_DIM // 64:
            return (
                f"members is {config.members} and go_after {config.go_after}; they must be 1 or 2, and from 5 to {HEAD_DIM // 64}"
            )
        by_rows = not paging.has_records(op) if self.gathers(op) else page_rows(op, config) < TILE_KV
        if config.cluster and (config.members == 1 or by_rows):
            return f"cluster is True; that takes members=2, and pages of {TILE_KV} rows or a multiple that TMA reads, or records"
        return tiling.too_large_block(SMEM_BYTES, device)

    def candidates(self, op: AttentionKVCache, device: Device) -> list[AttnMlaConfig]:
        """Pairs of blocks where rows fill more than one: a cluster where each can bring its part of a tile."""
        pairs = AttnMlaConfig(members=2, cluster=True), AttnMlaConfig(members=2)
        configs = pairs if most_rows(self.step(op)) > TILE_ROWS and device.sm_count > 1 else (AttnMlaConfig(),)
        return [config for config in configs if self.legal(config, op, device) is None][:1]

    def cost(self, config: AttnMlaConfig, op: AttentionKVCache, device: Device) -> float:
        """Counts how often the keys are read, once for each tile of rows, besides the start and the fold."""
        op = self.step(op)
        return _START + _FOLD + ceil_div(max(1, most_rows(op)), config.tile_q) * few_rows.read_seconds(op, op.kv_len)

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[AttentionKVCache, ...]:
        return (op,)

    def options(self, op: AttentionKVCache, config: AttnMlaConfig, arch: str) -> dict[str, Option]:
        """The option on each axis."""
        sums: Option = softmax.ConstantTime()
        pages = kv.PAGES[op.form]
        return {
            "Element": op.element,
            "Rows": paging.rows_option(op, rows.CacheRows(op.ragged, paging.lengths_option(op))),
            "Mask": rows.PackGqaMask(paging.mask_option(op)),
            "Score": rows.PackGqaScore(op.score.constant_time),
            "Softmax": softmax.WithSink(sums) if op.sinks else sums,
            "QColumns": rows.PairOfQ() if op.q_rope else rows.OneQ(),
            "Kv": gathered_option(op, kv.PagedKeys(pages), config.cluster)
            if self.gathers(op)
            else kv_option(pages, page_rows(op, config), config.cluster),
            "Members": members.ClusterMembers() if config.cluster else members.ApartMembers(),
            "Walk": WorkIntervalWalk(),
            "Scheduler": scheduler.EvenShares(config.members) if is_even(op) else scheduler.StreamK(config.members),
            "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
            "Launch": scheduler.launch_of(arch),
        }

    def fields(self, op: AttentionKVCache, config: AttnMlaConfig, arch: str) -> Fields:
        """The fields of struct Args, in order."""
        pool: Fields = (Field("k", "TmaPageRows", PageRows("k_cache", TILE_KV)),)
        if self.gathers(op):
            pool = (Field("k", "StridedPages", PagePool("k_cache", 0)),)
        elif config.cluster:
            pool = (Field("k", "TmaClusterPageRows", PageRows("k_cache", TILE_KV // config.members)),)
        elif page_rows(op, config) < TILE_KV:
            pool = (
                Field("k", "TmaPageBoxes", PageBoxes("k_cache")),
                Field("k_end", "TmaPageRows", PageRows("k_cache", SWIZZLE_ROWS)),
            )
        own = (
            Field("q", "StridedTensor", View("q")),
            Field("parked", "float*", Scratch("parked")),
            Field("shares", "void*", Scratch("shares")),
        )
        of_options = (field for option in self.options(op, config, arch).values() for field in option.fields)
        return tuple(dict.fromkeys((*pool, *own, *attn_decode_fold.SHARED, *of_options)))

    def constants(self, op: AttentionKVCache, config: AttnMlaConfig) -> dict[str, int]:
        """The compile-time numbers."""
        sizes = {"tile_q": config.tile_q, "tile_kv": TILE_KV, "head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM_V}
        of_fold = {"m_tiles_per_warp": 1, "most_blocks": MOST_BLOCKS}
        return {"members": config.members, "go_after": config.go_after, **sizes, **REGISTERS, **of_fold}

    def render(self, op: AttentionKVCache, config: AttnMlaConfig, arch: str) -> Source:
        """The source of operations of one kind."""
        negate = op.scale < 0
        products = [
            wgmma("QkMma", op.element, TILE_KV, a_in_registers=True, b_by_rows=False, negate=negate),
            wgmma("QkLastMma", op.element, TILE_KV, a_in_registers=False, b_by_rows=False, negate=negate),
            wgmma("PvMma", op.element, HEAD_DIM_V // 2, a_in_registers=False, b_by_rows=True),
        ]
        options = paging.in_records(self.options(op, config, arch), op, arch)
        return source(FILE, config_header(self.constants(op, config), self.fields(op, config, arch), products, options), arch)

    def render_fold(self, op: AttentionKVCache, config: AttnMlaConfig, arch: str) -> tuple[Source, Fields]:
        """The source and the fields of the launch that folds."""
        options = self.options(op, config, arch)
        return attn_decode_fold.source_and_fields(options, self.constants(op, config), arch)

    def values(self, op: AttentionKVCache, config: AttnMlaConfig) -> dict[str, float]:
        """The run-time numbers of struct Args; ``heads`` are those of the cache, and rows those of all that share one."""
        values: dict[str, float] = {"scale": abs(op.scale), "heads": op.kv_heads, "pack_gqa_heads": op.heads_per_kv}
        values |= paging.values(op) | {"slots": slots(op), "strips": strips(op, config)}
        keys, most = split_rule(op)
        values |= {
            "split_keys_log2": keys.bit_length() - 1,
            "most_splits_log2": most.bit_length() - 1,
            "long_keys": long_keys(op),
        }
        return values | op.mask.values | op.score.values

    def shares(self, op: AttentionKVCache, config: AttnMlaConfig, device: Device) -> int:
        """The number of shares of all keys: one for each multiprocessor or pair of them, or for each split that there may be;
        fewer where their states would take more than MOST_BYTES."""
        works = op.batch * ceil_div(max(1, most_rows(op)), config.tile_q)
        parts = ceil_div(max(1, op.kv_len), TILE_KV) if is_even(op) else most_splits(op)
        room = 1 + MOST_BYTES // (slots(op) * strips(op, config) * STRIP_BYTES)
        return min(device.sm_count // config.members, MOST_BLOCKS // config.members, works * parts, room)

    def rendered_kind(self, op: AttentionKVCache, config: AttnMlaConfig) -> tuple[object, ...]:
        """All that ``render`` and ``fields`` depend on besides the configuration."""
        page = 1 if self.gathers(op) else page_rows(op, config)
        options = op.form, page, op.ragged, op.sinks, op.scale < 0, op.q_rope, is_even(op), op.spec.kind
        return (op.element, op.kv_element, *paging.arrays_of(op), *options)

    def lower(self, op: AttentionKVCache, config: AttnMlaConfig, device: Device) -> Program:
        """The launch, and that of the fold where a sequence may have several splits: a work may be cut then. None where no row is
        computed."""
        if not op.total_q * op.batch:
            return Program(())
        key = (*self.rendered_kind(op, config), config, device.arch)
        rendered = self._keep(key, lambda: (self.render(op, config, device.arch), self.fields(op, config, device.arch)))
        step = self.step(op)
        shares = self.shares(step, config, device)
        grid = shares * config.members
        values = self.values(op, config) | {"borders": shares - (not is_even(op))}
        launches = [Launch(self.name, *rendered, values, grid)]
        if shares > 1 and (slots(step) > 1 or is_even(op)):
            fold = self._keep((attn_decode_fold.NAME, key), lambda: self.render_fold(op, config, device.arch))
            launches += [Launch(attn_decode_fold.NAME, *fold, values, device.sm_count)]
        states = max(1, values["borders"]) * slots(step) * strips(step, config) * STRIP_BYTES
        scratch = (
            ("partials", states),
            ("left", LEFT_BYTES * (shares + 1)),
            ("parked", 4 * STRIP_BYTES * grid),
            ("shares", SHARE_BYTES * grid),
        )
        return Program(tuple(launches), tuple(Buffer(*each) for each in scratch))

    def programs(self, op: AttentionKVCache, config: AttnMlaConfig, device: Device) -> tuple[Program, ...]:
        longest = dataclasses.replace(op, kv_len=LONGEST)  # which is folded
        return self.lower(op, config, device), self.lower(longest, config, device)


ATTN_MLA = AttnMla()
