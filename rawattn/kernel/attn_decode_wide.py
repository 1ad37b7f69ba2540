"""attn_decode_wide.cu: attention of tens to hundreds of rows over cached keys on Hopper, split as attn_decode splits them."""

from __future__ import annotations

import dataclasses

from ..compile.compiler import Source
from ..driver.device import Device
from ..operation import AttentionKVCache
from ..operation.operand import Layout
from ..variant import Option, kv, rows, scheduler, softmax, store
from ..variant.field import Field, Fields, View
from ..variant.walk import SplitIntervalWalk, lists
from . import attn_decode_fold, few_rows, paging, tiling
from .attn_decode import MOST_BLOCKS, MOST_ROWS, ceil_div, is_wide, most_rows
from .attn_decode_fold import LEFT_BYTES
from .attn_fwd_kvcache import kv_kind, kv_option, page_rows, pools
from .base import Kernel
from .paging import LONGEST
from .program import Buffer, Launch, Program
from .render import config_header, source, wgmma

FILE = "attn_decode_wide.cu"
LEAST_KEYS = 512  # of a split: a state of 64 rows is an eighth of these at head_dim 128
MOST_SPLITS = 32
MOST_BYTES = 150_000_000  # of what blocks leave, on a stream: states of splits, besides LEFT_BYTES of each
_START, _FOLD = 8e-6, 2e-6  # seconds; guessed


@dataclasses.dataclass(frozen=True)
class AttnDecodeWideConfig:
    """The configuration of attn_decode_wide.cu."""

    tile_q: int = 64
    tile_kv: int = 64
    stages: int = 4  # of the rings of K and V
    q_stages: int = 1

    @property
    def consumers(self) -> int:
        """Consumer warpgroups, 64 rows each."""
        return self.tile_q // 64


def panels(columns: int) -> int:
    """Panels of 64 columns that a tile row takes in shared memory."""
    return ceil_div(columns, 64)


def smem_bytes(op: AttentionKVCache, config: AttnDecodeWideConfig) -> int:
    """Shared memory of a block, at most."""
    rows = config.stages * config.tile_kv
    tiles = 128 * (config.q_stages * config.tile_q * panels(op.head_dim) + rows * (panels(op.head_dim) + panels(op.head_dim_v)))
    return tiles + 4 * config.tile_q * op.head_dim_v + 16 * (config.q_stages + 2 * config.stages) + 1024  # ... and totals


def registers(config: AttnDecodeWideConfig) -> tuple[int, int]:
    """Registers of a producer thread and of a consumer thread."""
    return {1: (128, 256), 2: (88, 208)}[config.consumers]


def split_rule(op: AttentionKVCache) -> tuple[int, int]:
    """The fewest keys of a split and the most splits, powers of two, by the model and the most rows: never by the batch. Of large
    states there are fewer, else there would be no room for those of a block on each multiprocessor."""
    is_small = op.kv_heads <= 4 and most_rows(op) <= 64 and op.head_dim_v <= 128
    most = MOST_SPLITS if op.split_keys or is_small else MOST_SPLITS // 2
    return min(op.split_keys, LONGEST + 1) or LEAST_KEYS, most


def slots(op: AttentionKVCache) -> int:
    """States that two blocks may leave at the border between them, as many as splits of a sequence: one of all before it, and one
    of each split after it."""
    keys, most = split_rule(op)
    return min(most, ceil_div(max(1, op.kv_len), 1 << keys.bit_length() - 1))


def strips(op: AttentionKVCache, config: AttnDecodeWideConfig) -> int:
    """Runs of 16 rows that a work has at most."""
    return min(config.tile_q, 16 * ceil_div(max(1, most_rows(op)), 16)) // 16


def state_bytes(op: AttentionKVCache, config: AttnDecodeWideConfig) -> int:
    return strips(op, config) * (64 * op.head_dim_v + 128)


def partials_bytes(op: AttentionKVCache, config: AttnDecodeWideConfig, grid: int) -> int:
    """Bytes of the states at all borders between blocks."""
    return max(1, grid - 1) * slots(op) * state_bytes(op, config)


def is_read_once(op: AttentionKVCache, config: AttnDecodeWideConfig) -> bool:
    """Says whether one tile of rows reads a key, so that L2 gives it away before the states that blocks leave."""
    return most_rows(op) <= config.tile_q and kv_kind(op, config) not in (kv.PagedBoxesKv, kv.PagedCopiesKv)


class AttnDecodeWide(Kernel[AttentionKVCache]):
    """The kernel; its configuration follows from the sizes."""

    name = "attn_decode_wide"
    needs = "a Hopper GPU (compute capability 9.0)"
    config_type = AttnDecodeWideConfig

    def runs_on(self, device: Device) -> bool:
        return device.arch == "sm_90a"

    def prefers(self, op: AttentionKVCache, device: Device) -> bool:
        return is_wide(op)

    def meant_for(self, op: AttentionKVCache, device: Device) -> bool:
        return False

    def supports(self, op: AttentionKVCache, device: Device) -> list[str]:
        reasons = self.device_reasons(device) + paging.reasons_of_tiles(op) + tiling.tensor_core_reasons(paging.over_tensors(op))
        for which, size in (("head_dim", op.head_dim), ("head_dim_v", op.head_dim_v)):
            if size % 16 or not 16 <= size <= 256:
                reasons.append(f"{which} is {size}; it takes multiples of 16 from 16 to 256")
        if most_rows(op) > MOST_ROWS:
            reasons.append(f"a sequence may have {most_rows(op)} rows; it takes up to {MOST_ROWS}")
        if op.pages == 0:
            reasons.append("the cache has no pages")
        if paging.has_functions(op) or lists(op.mask) or op.mask.of_head is not None:
            reasons.append("its mask or its score is a function, or the mask has holes or differs by head")
        if op.spec.invariant:
            reasons.append("invariant calls have one configuration for all steps, that of attn_decode")
        return reasons + tiling.reasons(self.layout_reason(op.layout))

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.unaligned or layout.tma_unsupported

    def legal(self, config: AttnDecodeWideConfig, op: AttentionKVCache, device: Device) -> str | None:
        if config.tile_q not in (64, 128) or config.tile_kv not in (32, 64):
            return f"tile_q is {config.tile_q} and tile_kv {config.tile_kv}; they must be 64 or 128, and 32 or 64"
        if config.tile_q == 128 and op.head_dim_v > 160:
            return f"tile_q is 128; it must be 64 where head_dim_v is {op.head_dim_v}"
        if config.stages < 2 or config.q_stages not in (1, 2):
            return f"stages is {config.stages} and q_stages {config.q_stages}; they must be at least 2, and 1 or 2"
        return tiling.too_large_block(smem_bytes(op, config), device)

    def candidates(self, op: AttentionKVCache, device: Device) -> list[AttnDecodeWideConfig]:
        """The configuration with as many stages as fit, up to ten, and a second tile of Q where it leaves the ring four;
        shorter key tiles where not even three fit. More than 64 rows are two tiles where blocks would be without work."""
        works = op.batch * op.kv_heads * slots(op)
        tile_q = 128 if most_rows(op) > 64 and op.head_dim_v <= 160 and 2 * works > device.sm_count else 64
        fewest = ((64, 2, 4), (64, 1, 3), (32, 1, 2))  # tile_kv, q_stages and the fewest stages, the best first
        rings = [AttnDecodeWideConfig(tile_q, kv, n, q) for kv, q, least in fewest for n in range(10, least - 1, -1)]
        return [config for config in rings if self.legal(config, op, device) is None][:1]

    def cost(self, config: AttnDecodeWideConfig, op: AttentionKVCache, device: Device) -> float:
        """Counts how often the keys are read, once for each tile of rows, besides the start and the fold."""
        return _START + _FOLD + ceil_div(max(1, most_rows(op)), config.tile_q) * few_rows.read_seconds(op, op.kv_len)

    def tuning_shapes(self, op: AttentionKVCache) -> tuple[AttentionKVCache, ...]:
        return (op,)

    def options(self, op: AttentionKVCache, config: AttnDecodeWideConfig, arch: str) -> dict[str, Option]:
        """The option on each axis."""
        sums: Option = softmax.ConstantTime()
        return {
            "Element": op.element,
            "Rows": paging.rows_option(op, rows.CacheRows(op.ragged, paging.lengths_option(op))),
            "Mask": rows.PackGqaMask(paging.mask_option(op)),
            "Score": rows.PackGqaScore(op.score.constant_time),
            "Softmax": softmax.WithSink(sums) if op.sinks else sums,
            "Order": scheduler.PingPong() if config.consumers == 2 else scheduler.Unordered(),
            "Kv": kv_option(op, config, 2),
            "Walk": SplitIntervalWalk(),
            "Scheduler": scheduler.StreamKScheduler(),
            "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
            "Launch": scheduler.launch_of(arch),
        }

    def fields(self, op: AttentionKVCache, config: AttnDecodeWideConfig, arch: str) -> Fields:
        """The fields of struct Args, in order."""
        keys = pools(op, config)
        common = (
            *([each._replace(ctype="TmaPageRowsOnce") for each in keys] if is_read_once(op, config) else keys),
            Field("q", "StridedTensor", View("q")),
            *attn_decode_fold.SHARED,
            Field("heads_per_kv", "i32"),
        )
        of_options = (field for option in self.options(op, config, arch).values() for field in option.fields)
        return tuple(dict.fromkeys((*common, *of_options)))

    def constants(self, op: AttentionKVCache, config: AttnDecodeWideConfig) -> dict[str, int]:
        """The compile-time numbers."""
        producer, consumer = registers(config)
        constants = {**dataclasses.asdict(config), "consumers": config.consumers, "m_tiles_per_warp": 1}
        constants |= {"producer_registers": producer, "consumer_registers": consumer, "head_dim": op.head_dim}
        return constants | {"head_dim_v": op.head_dim_v, "most_blocks": MOST_BLOCKS}

    def render(self, op: AttentionKVCache, config: AttnDecodeWideConfig, arch: str) -> Source:
        """The source of operations of one kind."""
        products = [
            wgmma("QkMma", op.element, config.tile_kv, a_in_registers=False, b_by_rows=False, negate=op.scale < 0),
            wgmma("PvMma", op.element, op.head_dim_v, a_in_registers=True, b_by_rows=True),
        ]
        options = self.options(op, config, arch)
        return source(FILE, config_header(self.constants(op, config), self.fields(op, config, arch), products, options), arch)

    def render_fold(self, op: AttentionKVCache, config: AttnDecodeWideConfig, arch: str) -> tuple[Source, Fields]:
        """The source and the fields of the launch that folds."""
        return attn_decode_fold.source_and_fields(self.options(op, config, arch), self.constants(op, config), arch)

    def values(self, op: AttentionKVCache, config: AttnDecodeWideConfig) -> dict[str, float]:
        """The run-time numbers of struct Args; ``heads`` are those of the cache, and rows those of all that share one."""
        values: dict[str, float] = {
            "scale": abs(op.scale),
            "heads": op.kv_heads,
            "pack_gqa_heads": op.heads_per_kv,
            "heads_per_kv": 1,
        }
        values |= paging.values(op) | {"slots": slots(op), "strips": strips(op, config)}
        keys, most = split_rule(op)
        values |= {"split_keys_log2": keys.bit_length() - 1, "most_splits_log2": most.bit_length() - 1}
        return values | op.mask.values | op.score.values

    def grid(self, op: AttentionKVCache, config: AttnDecodeWideConfig, device: Device) -> int:
        """The number of blocks: one for each multiprocessor, or for each split that there may be; fewer where their states would
        take more than MOST_BYTES."""
        works = op.batch * op.kv_heads * ceil_div(max(1, most_rows(op)), config.tile_q)
        room = 1 + (MOST_BYTES - LEFT_BYTES * MOST_BLOCKS) // (slots(op) * state_bytes(op, config))
        return min(device.sm_count, MOST_BLOCKS, works * slots(op), room)

    def lower(self, op: AttentionKVCache, config: AttnDecodeWideConfig, device: Device) -> Program:
        """The launch, and that of the fold where a sequence may have several splits: a work may be cut then. None where no row is
        computed."""
        if not op.total_q * op.batch:
            return Program(())
        options = (
            op.form,
            page_rows(op, config),
            kv_kind(op, config),
            op.ragged,
            op.sinks,
            op.scale < 0,
            op.spec.kind,
            is_read_once(op, config),
        )
        key = (op.element, *paging.arrays_of(op), op.head_dim, op.head_dim_v, *options, config, device.arch)
        rendered = self._keep(key, lambda: (self.render(op, config, device.arch), self.fields(op, config, device.arch)))
        grid = self.grid(op, config, device)
        values = self.values(op, config) | {"borders": grid - 1}
        launches = [Launch(self.name, *rendered, values, grid)]
        if grid > 1 and slots(op) > 1:
            fold = self._keep((attn_decode_fold.NAME, key), lambda: self.render_fold(op, config, device.arch))
            launches += [Launch(attn_decode_fold.NAME, *fold, values, device.sm_count)]
        scratch = Buffer("partials", partials_bytes(op, config, grid)), Buffer("left", LEFT_BYTES * grid)
        return Program(tuple(launches), scratch)

    def programs(self, op: AttentionKVCache, config: AttnDecodeWideConfig, device: Device) -> tuple[Program, ...]:
        longest = dataclasses.replace(op, kv_len=LONGEST)  # which is folded
        return self.lower(op, config, device), self.lower(longest, config, device)


ATTN_DECODE_WIDE = AttnDecodeWide()
