"""Splits of the keys of few queries: their options, and by sizes alone what they take and save."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..variant import Option, scheduler, store
from ..variant.mask import SplitTilesMask

MOST = 64  # splits of a tile of queries
_NUMBERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
# Fitted to timings on an H200 (perf/notes/attn_fwd.md, "Few rows over many keys").
_READ = 4.4e12  # bytes a second, from memory
_FOLD, _FOLD_READ = 3e-6, 5e12  # seconds of the launch that folds; bytes a second that are written for it and read by it


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
