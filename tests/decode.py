"""config.cuh of attn_decode.cu, for tests: its constants, fields and options, and what its arguments hold."""

from __future__ import annotations

import dataclasses

from rawattn import render
from rawattn.compiler import Source
from rawattn.program import Field, Fields, Pointer, Scratch
from rawattn.variant import Option, kv, launch, rows, scheduler, score, softmax, store, weight
from rawattn.variant.element import BF16, Element
from rawattn.variant.mask import Causal, Mask
from rawattn.variant.score import Score

SPLIT_GROUP = 8  # tile/splits.cuh
MOST_SPLITS = 128  # for which there is room in the block's list
FILE = "attn_decode.cu"


@dataclasses.dataclass(frozen=True)
class Decode:
    """A step over cached keys. ``page`` is 0 for a dense cache, where sequence i is page i. ``q_len`` is the most that a sequence
    has where ``varlen``."""

    batch: int = 1
    q_len: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    page: int = 0
    varlen: bool = False
    total_q: int = 0
    mask: Mask = Causal()  # noqa: RUF009
    score: Score = score.Scale()  # noqa: RUF009
    scale: float = 0.088
    sinks: bool = False
    return_lse: bool = True
    element: Element = BF16
    aligned: bool = True  # as TMA needs the pools
    split_keys: int = 0  # 0: by the sequence's length

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        return self.q_len * self.group


@dataclasses.dataclass(frozen=True)
class Config:
    """A configuration of attn_decode.cu: 16 rows for each of ``m_tiles_per_warp``, the stages of the ring, the contraction steps
    whose Q stays in registers, the steps of 32 keys whose scores are computed together, and the passes by which warps exchange
    columns."""

    m_tiles_per_warp: int = 1
    tile_kv: int = 64
    stages: int = 5
    q_steps_in_registers: int = 8
    steps_at_once: int = 2
    merge_passes: int = 1
    cp_async: bool = False

    @property
    def tile_q(self) -> int:
        return 16 * self.m_tiles_per_warp

    @property
    def warps(self) -> int:
        return 5


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def smem_bytes(op: Decode, config: Config) -> int:
    """Shared memory of a block, about."""
    blocks = ceil_div(op.head_dim_v, 32)
    tile = 2 * config.tile_kv * (op.head_dim + op.head_dim_v)
    fixed = (
        2 * config.tile_q * op.head_dim
        + 8192 * blocks // config.merge_passes
        + 2048
        + 4096 * (blocks + 1) * config.m_tiles_per_warp
    )
    return config.stages * (tile + 24) + fixed + 1500


def config_of(op: Decode, arch: str) -> Config:
    """The configuration: as many stages as fit, up to ten. Wide heads keep O in registers and Q in shared memory."""
    cp_async = arch in ("sm_80", "sm_86", "sm_87", "sm_89") or 0 < op.page < 8 or not op.aligned
    room = {"sm_80": 166_912, "sm_87": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_120": 101_376}.get(arch, 232_448)
    wide = max(op.head_dim, op.head_dim_v) > 192 or (op.head_dim + op.head_dim_v) > 384
    m_tiles = 2 if op.rows > 16 and not wide else 1
    blocks = ceil_div(op.head_dim_v, 32)
    tile = 32 if wide or (room < 110_000 and op.head_dim + op.head_dim_v > 128) else 64
    kept = 0 if m_tiles == 2 or wide else op.head_dim // 16
    for passes in (p for p in (1, 2, 4, 8) if blocks % p == 0):
        config = Config(m_tiles, tile, 1, kept, 1 if m_tiles == 2 or tile == 32 else 2, passes, cp_async)
        stages = (room - smem_bytes(op, config)) // (2 * tile * (op.head_dim + op.head_dim_v) + 24) + 1
        if stages >= 4:
            break
    return dataclasses.replace(config, stages=min(10, stages))


def page_rows(op: Decode, config: Config) -> int:
    """Rows of a tile that lie in one page."""
    return config.tile_kv if config.cp_async or not op.page else min(op.page, config.tile_kv)


def split_values(op: Decode, config: Config) -> dict[str, int]:
    """Keys of a split at least, and splits at most: constants of the model."""
    most = {1: 64, 2: 64, 4: 32}.get(op.kv_heads, 16 if op.kv_heads > 4 else 32)
    if op.split_keys:
        return {"split_keys": op.split_keys, "most_splits": MOST_SPLITS}
    return {"split_keys": 4 * config.tile_kv, "most_splits": most}


def slots(op: Decode, config: Config) -> int:
    """States that a block may leave in global memory."""
    return SPLIT_GROUP + ceil_div(split_values(op, config)["most_splits"], SPLIT_GROUP)


def state_floats(op: Decode, config: Config) -> int:
    return (512 * ceil_div(op.head_dim_v, 32) + 32) * config.m_tiles_per_warp


def workspace(op: Decode, config: Config, grid: int) -> dict[str, int]:
    """Bytes of scratch memory, and of counters, which are zero between launches."""
    q_blocks = ceil_div(op.rows, config.tile_q)
    return {
        "partials": 4 * grid * slots(op, config) * state_floats(op, config),
        "arrived": 4 * op.batch * op.kv_heads * q_blocks,
        "violations": 4,
    }


def options(op: Decode, config: Config, arch: str) -> dict[str, Option]:
    plain = softmax.Plain()
    return {
        "Element": op.element,
        "Rows": rows.CacheRows(op.varlen),
        "Mask": rows.PackGqaMask(op.mask),  # type: ignore[arg-type]
        "Score": rows.PackGqaScore(getattr(op.score, "constant_time", op.score)),
        "Softmax": softmax.WithSink(plain) if op.sinks else plain,
        "Weight": weight.Identity(),
        "Kv": kv.PagedKv(op.page > 0, page_rows(op, config), config.cp_async),
        "Scheduler": scheduler.StreamKScheduler(),
        "Store": store.StoreOLse() if op.return_lse else store.StoreO(),
        "Launch": launch.Dependent() if arch in ("sm_90a", "sm_100", "sm_120") else launch.Independent(),
    }


def fields(op: Decode, config: Config, arch: str) -> Fields:
    pool = "StridedPages" if config.cp_async else "TmaPages"
    common = (
        *(Field(name, pool) for name in "kv"),
        Field("q", "StridedTensor"),
        Field("partials", "float*", Scratch("partials")),
        Field("arrived", "u32*", Pointer("arrived")),
        Field("violations", "u32*", Pointer("violations")),
        Field("scale", "Number"),
        Field("heads", "i32"),
        Field("q_blocks", "i32"),
    )
    return (*common, *dict.fromkeys(f for option in options(op, config, arch).values() for f in option.fields))


def source(op: Decode, config: Config, arch: str) -> Source:
    constants = {**dataclasses.asdict(config), "tile_q": config.tile_q, "warps": config.warps, "threads": 32 * config.warps}
    del constants["cp_async"]
    constants |= {"head_dim": op.head_dim, "head_dim_v": op.head_dim_v, "slots": slots(op, config), "most_pieces": MOST_SPLITS}
    constants["q_signs"] = -0x7FFF8000 if op.scale < 0 else 0
    header = render.config_header(constants, fields(op, config, arch), [], options(op, config, arch))
    return render.source(FILE, header, arch)


def values(op: Decode, config: Config, max_kv_len: int, table_stride: int = 0) -> dict[str, float]:
    """The numbers of struct Args. ``heads`` are those of the cache."""
    found: dict[str, float] = {
        "scale": abs(op.scale), "heads": op.kv_heads, "pack_gqa_heads": op.group, "batches": op.batch, "max_kv_len": max_kv_len,
        "q_len": op.q_len, "max_q_len": op.q_len, "total_q": op.total_q, "q_blocks": ceil_div(op.rows, config.tile_q),
        "page_table_stride": table_stride, "page_shift": op.page.bit_length() - 1,
    }  # fmt: skip
    return found | split_values(op, config) | op.mask.values | op.score.values
