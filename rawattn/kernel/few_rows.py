"""Splits of the keys of few queries: which operations have them, their options, and by sizes alone what they take and save."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from ..driver.device import Device
from ..operation import Forward
from ..variant import Option, scheduler, store
from ..variant.mask import Causal, Full, SplitTilesMask
from ..variant.walk import lists
from . import tiling

MOST = 64  # splits of a tile of queries
SPARSE_TILES = 264  # of 64 rows, up to which keys may be split: two for each multiprocessor
UNEVEN_TILES = 6 * SPARSE_TILES  # up to which the keys of long sequences may be split where the last wave would be short
UNEVEN_QUERIES, UNEVEN_KEYS = 256, 8192  # of such a sequence at least
MOST_SCRATCH = 128 << 20  # bytes of what splits leave to be folded
SHARED_ROWS = 16  # of a key head, above which tiles of 64 rows read keys faster than attn_fwd_mma's of 32
SPLIT_KEYS = 1024  # of a split of few rows at least: the fold moves an eighth of their bytes
_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
# Fitted to timings on an H200 (perf/notes/attn_fwd.md, "Few rows over many keys").
_READ = 4.4e12  # bytes a second, from memory
# Seconds of the launch that folds; bytes a second that are written for it and read by it. Wide heads keep an older fit.
_FOLD, _FOLD_OF_WIDE = (4e-6, 4e12), (3e-6, 5e12)
_AGAIN, _SHARED = 0.5, 0.25  # of a reading what the next one takes; the power of the tiles that read the same keys at once
PAIR = 0.9  # of the time that AttnFwd.seconds has for two warpgroups above head_dim 80, where there are few rows
IDLE = 0.5  # of the time of a block, were all its warpgroups without rows
SHARING = 1.04  # ... that tiles which heads share take from 128 queries on: 1.00 to 1.06 of it
WIDEST = 128  # of head_dim and head_dim_v, up to which that was measured
MOST_ALONE = 32  # queries whose heads may leave most rows of a tile of 64 empty
FASTER = 1.25  # how much less time another kernel must take by the cost models, which err by as much, to come first


def may_split(op: Forward) -> bool:
    """Says whether keys may be split: the fold knows no packed sequences, and functions and lists see all of them."""
    return not (op.mask.is_function or op.score.is_function or lists(op.mask) or op.varlen or op.invariant)


def may_share(op: Forward) -> bool:
    """Says whether the query heads that share a key head may share tiles of 64 or 128 rows."""
    heads = op.heads_per_kv
    return may_split(op) and heads > 1 and 128 % heads == 0 and not (op.q_lens or op.layout.repeats_heads)


def share(op: Forward) -> bool:
    """Says whether they do: where one head has enough rows for tiles of 128, tiles of its own are as fast or faster."""
    return may_share(op) and not may_be_own(op)


def may_be_own(op: Forward) -> bool:
    """Says whether heads that may share tiles may have tiles of their own instead."""
    return op.q_len >= 128 and op.widest <= WIDEST


def are_few(op: Forward) -> bool:
    """Says whether all rows of a key head are one tile, over keys worth splitting. Their splits follow from the sequence alone,
    as in every kernel for few rows."""
    is_tile = tiling.is_few(op) and op.q_len * op.heads_per_kv > SHARED_ROWS and op.kv_len >= SPLIT_KEYS
    return is_tile and may_split(op) and (op.heads_per_kv == 1 or may_share(op))


def is_outrun(kernel: Any, other: Any, op: Any, device: Device) -> bool:
    """Says whether few queries would leave most rows of the tiles of ``kernel`` empty, as so many heads cannot share them, and
    those of ``other``, which hold rows of any number of heads, take less time by both cost models."""
    seconds = (min((each.cost(c, op, device) for c in each.candidates(op, device)), default=math.inf) for each in (kernel, other))
    return op.heads_per_kv > 1 and 0 < op.q_len <= MOST_ALONE and next(seconds) > FASTER * next(seconds)


def most_parts(op: Forward) -> int:
    """The splits of few rows at most: 64 works of a sequence read its keys as fast as 128 do, and leave less to fold."""
    return max(4, MOST // op.kv_heads) if op.widest <= WIDEST else MOST


def count_tiles(op: Forward) -> int:
    """The tiles of 64 rows, were those of all heads that share a key head side by side."""
    return -(-op.q_len * op.heads_per_kv // 64) * op.kv_heads * op.batch


def are_sparse(op: Forward) -> bool:
    """Says whether tiles of queries are so few that splits of keys may be worth it."""
    may = count_tiles(op) <= SPARSE_TILES and op.kv_len >= SPLIT_KEYS and may_split(op)
    return are_few(op) or (may and not tiling.is_few(op))


def are_uneven(op: Forward) -> bool:
    """Says whether tiles of 128 rows and more are a few waves, over keys so long that it may be worth to split them rather than
    leave multiprocessors idle in the last one."""
    fits = SPARSE_TILES < count_tiles(op) <= UNEVEN_TILES and op.q_len >= UNEVEN_QUERIES and op.kv_len >= UNEVEN_KEYS
    return fits and may_split(op) and op.widest <= WIDEST


def splits_of(op: Forward, config: Any) -> tuple[int, ...]:
    """The numbers of splits that a configuration may have for uneven waves: as many as the sizes suggest in tiles of 128 and 256
    rows, one in those of 192."""
    large = {(256, 64): (0,), (192, 128): (1,)} if op.widest <= 64 else {(192, 64): (1,)}
    return ({(128, 128): (0,)} | large).get((config.tile_q, config.tile_kv), ())


def uneven_shapes(op: Forward) -> tuple[Forward, ...]:
    """The operations by which configurations for uneven waves are compared."""
    first = tuning_shapes(op, True)[0]
    return tuple(
        dataclasses.replace(first, heads=8, kv_heads=8, q_len=n, kv_len=16384, total_q=n, total_kv=16384)
        for n in (4095, 3072, 2880)
    )


def most_rows(op: Forward) -> int:
    """The rows of a tile at most."""
    return 64 if are_few(op) else 192


def tuning_shapes(op: Forward, shares: bool) -> tuple[Forward, ...]:
    """The operations by which configurations for few rows are compared: one sequence whose rows of a key head fill a tile of 64,
    and for more rows also larger ones. Where heads have tiles of their own it is the rows of a head that fill them; if they could
    share tiles these are compared with them, but for the own ones of 64 rows."""
    mask, each = op.mask if isinstance(op.mask, Full) else Causal(), op.heads_per_kv
    plain = tiling.with_mask(op, mask)
    plain = dataclasses.replace(plain, spec=plain.spec.at(op.spec.offsets and (0, 0)))
    sizes = range(1, most_rows(op) // 64 + 1)
    shared = [(max(1, 64 * n // each), 8) for n in sizes if shares or may_share(op)]
    own = [(64 * n, max(1, min(8, SPARSE_TILES // 3 // each))) for n in sizes if not (shares or (n == 1 and shared))]
    return tuple(
        dataclasses.replace(plain, batch=1, q_len=n, kv_len=16384, heads=h * each, kv_heads=h, total_q=n, total_kv=16384)
        for n, h in dict.fromkeys(shared + own)
        if -(-n * each // 64) * h <= SPARSE_TILES
    )


def options(mask: Option) -> dict[str, Option]:
    """The options of attn_fwd where keys are split; ``mask`` is what it has for a mask."""
    plan = scheduler.LptScheduler(persistent=True, split=True)
    return {"Mask": SplitTilesMask(mask), "Scheduler": plan, "Store": store.StorePartial()}


def numbers(op: Forward, key_tiles: int) -> Iterable[int]:
    """The numbers of splits that are compared."""
    most = MOST_SCRATCH // max(1, 4 * op.batch * op.q_len * op.heads * op.head_dim_v)
    return [n for n in _NUMBERS if n <= max(1, min(key_tiles, most))]


def overlap(a: float, b: float) -> float:
    """The time, about, that two overlapping things take which alone take ``a`` and ``b``."""
    return float((a**4 + b**4) ** 0.25)


def read_seconds(op: Any, kv_len: int) -> float:
    """The seconds in which so many keys of each sequence are read from memory, once."""
    element = getattr(op, "kv_element", None) or op.element
    return float(op.batch * kv_len * op.kv_heads * (op.head_dim + op.head_dim_v) * element.itemsize / _READ)


def readings(read: float, q_tiles: int, heads: int, waves: float, device: Device) -> float:
    """Returns how often as long as ``read`` it takes to read keys for works of so many ``waves``. What does not fit L2 is read
    again for the tiles that come later, and by tiles that read it at once, those of ``heads`` that share a key head, not quite
    once."""
    if read * _READ <= device.l2_bytes:
        return 1.0
    return float((1 + _AGAIN * (min(max(1.0, waves), q_tiles) - 1)) * (q_tiles * heads) ** _SHARED)


def fold_seconds(op: Any, splits: int) -> float:
    """The seconds of the launch that folds splits, and of what is written for it."""
    written = 4 * splits * op.batch * op.q_len * op.heads * op.head_dim_v
    seconds, rate = _FOLD if op.widest <= WIDEST else _FOLD_OF_WIDE
    return 0.0 if splits == 1 else seconds + 2 * written / rate
