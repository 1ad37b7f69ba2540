"""Splits of the keys of few queries: which operations have them, their options, and by sizes alone what they take and save."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..operation import Forward
from ..variant import Option, scheduler, store
from ..variant.mask import Causal, Full, SplitTilesMask
from ..variant.walk import lists
from . import tiling

MOST = 64  # splits of a tile of queries
SPARSE_TILES = 264  # of 64 rows, up to which keys may be split: two for each multiprocessor
SHARED_ROWS = 16  # of a key head, above which tiles of 64 rows read keys faster than attn_fwd_mma's of 32
SPLIT_KEYS = 1024  # of a split of few rows at least: the fold moves an eighth of their bytes
_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
# Fitted to timings on an H200 (perf/notes/attn_fwd.md, "Few rows over many keys").
_READ = 4.4e12  # bytes a second, from memory
_FOLD, _FOLD_READ = 3e-6, 5e12  # seconds of the launch that folds; bytes a second that are written for it and read by it


def may_split(op: Forward) -> bool:
    """Says whether keys may be split: the fold knows no packed sequences, and functions and lists see all of them."""
    return not (op.mask.is_function or op.score.is_function or lists(op.mask) or op.varlen or op.invariant)


def may_share(op: Forward) -> bool:
    """Says whether the query heads that share a key head may share tiles of 64 or 128 rows."""
    heads = op.heads_per_kv
    return may_split(op) and heads > 1 and 128 % heads == 0 and not (op.q_lens or op.layout.repeats_heads)


def are_few(op: Forward) -> bool:
    """Says whether all rows of a key head are one tile, over keys worth splitting. Their splits follow from the sequence alone,
    as in every kernel for few rows."""
    is_tile = tiling.is_few(op) and op.q_len * op.heads_per_kv > SHARED_ROWS and op.kv_len >= SPLIT_KEYS
    return is_tile and may_split(op) and (op.heads_per_kv == 1 or may_share(op))


def are_sparse(op: Forward) -> bool:
    """Says whether tiles of queries are so few that splits of keys may be worth it."""
    tiles = -(-op.q_len * op.heads_per_kv // 64) * op.kv_heads * op.batch
    are_filled = op.heads_per_kv == 1 or op.q_len >= 64 or may_share(op)
    may = tiles <= SPARSE_TILES and op.kv_len >= SPLIT_KEYS and may_split(op) and are_filled
    return are_few(op) or (may and not tiling.is_few(op))


def tuning_shapes(op: Forward) -> tuple[Forward, ...]:
    """The operations by which configurations for few rows are compared: one sequence whose rows of a key head fill a tile of 64,
    and for more rows also two such tiles."""
    mask, heads = op.mask if isinstance(op.mask, Full) else Causal(), 8 * op.heads_per_kv
    plain = tiling.with_mask(op, mask)
    plain = dataclasses.replace(plain, spec=plain.spec.at(op.spec.offsets and (0, 0)))
    sizes = (1,) if are_few(op) else (1, 2)
    lengths = {max(1, 64 * n // op.heads_per_kv): 16384 for n in sizes}
    return tuple(
        dataclasses.replace(plain, batch=1, q_len=n, kv_len=kv, heads=heads, kv_heads=8, total_q=n, total_kv=kv)
        for n, kv in lengths.items()
    )


def options(mask: Option) -> dict[str, Option]:
    """The options of attn_fwd where keys are split; ``mask`` is what it has for a mask."""
    plan = scheduler.LptScheduler(persistent=True, split=True)
    return {"Mask": SplitTilesMask(mask), "Scheduler": plan, "Store": store.StorePartial()}


def numbers(key_tiles: int) -> Iterable[int]:
    """The numbers of splits that are compared."""
    return [n for n in _NUMBERS if n <= max(1, key_tiles)]


def overlap(a: float, b: float) -> float:
    """The time, about, that two overlapping things take which alone take ``a`` and ``b``."""
    return float((a**4 + b**4) ** 0.25)


def read_seconds(op: Any, kv_len: int) -> float:
    """The seconds in which so many keys of each sequence are read from memory, once."""
    element = getattr(op, "kv_element", None) or op.element
    return float(op.batch * kv_len * op.kv_heads * (op.head_dim + op.head_dim_v) * element.itemsize / _READ)


def fold_seconds(op: Any, splits: int) -> float:
    """The seconds of the launch that folds splits, and of what is written for it."""
    written = 4 * splits * op.batch * op.q_len * op.heads * op.head_dim_v
    return 0.0 if splits == 1 else _FOLD + 2 * written / _FOLD_READ
