"""What the Python faces of all kernels share, all that follows from the problem alone: its choices, the values that a launch
fills in, its tiles, the keys that its mask keeps, and the problems that stand for its kind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ..device import Device
from ..problem import Problem
from ..variant import Fields, Option, constant_time, rows, scheduler, weight
from ..variant.mask import Causal, Full, Ints, Mask

RESERVED_SMEM = 1024  # bytes that the system takes for each block


def tuning_shapes(problem: Problem) -> tuple[Problem, ...]:
    """The problems by which configurations are compared: one that fills a GPU many times over, one that fills it about twice, and
    one that does not. They have nothing that is a run-time value in the kernel: all that a kind of problem may ever run in is
    compiled together, and a new length, batch, window or number of heads compiles nothing."""
    mask = problem.mask if isinstance(problem.mask, Full) else Causal()
    sizes = ((8, 2048, 16), (1, 4096, 8), (1, 512, 8))  # batch, length, heads
    return tuple(
        dataclasses.replace(problem, batch=b, q_len=n, kv_len=n, heads=h, kv_heads=h, mask=mask, total_q=b * n, total_kv=b * n)
        for b, n, h in sizes
    )


def choices(problem: Problem, **own: Option) -> dict[str, Option]:
    """The choice on each axis, by the name that a kernel has for it; ``own`` are those that are for one kernel."""
    found: dict[str, Option] = {
        "Element": problem.element,
        "Rows": rows.Varlen() if problem.varlen else rows.Dense(),
        "Mask": problem.mask,  # type: ignore[dict-item]  # a Mask is a Option with an interval
        "Score": problem.score,  # type: ignore[dict-item]  # likewise
        "Weight": weight.Identity(),
        **own,
    }
    return constant_time(found) if problem.constant_time else found


def lpt_scheduler(problem: Problem, persistent: bool) -> Option:
    """The schedule of a problem's sequences."""
    return scheduler.LptVarlenScheduler(persistent) if problem.varlen else scheduler.LptScheduler(persistent)


def fields(choices: dict[str, Option], tensor: str) -> Fields:
    """The fields of struct Args, in order; ``tensor`` is the C++ type of q, k and v."""
    common = (*((name, tensor) for name in "qkv"), ("scale", "Number"), ("heads", "i32"), ("heads_per_kv", "i32"))
    return (*common, *(field for choice in choices.values() for field in choice.fields))


def tiles(problem: Problem, tile_q: int) -> int:
    """Query tiles of all heads; for packed sequences a bound on them."""
    found = -(-problem.q_len // tile_q) * problem.batch
    if problem.varlen:
        found = min(found, problem.total_q // tile_q + problem.batch)
    return found * problem.heads


@functools.lru_cache(maxsize=256)
def kept_keys(mask: Mask, q_len: int, kv_len: int, tile_q: int) -> tuple[Ints, Ints]:
    """First and one past the last key that 64 rows keep, or a smaller tile, for the strips of up to 64 sampled query tiles:
    (tiles, strips)."""
    q_len = max(1, q_len)
    first = np.unique(np.linspace(0, (q_len - 1) // tile_q, 64).astype(np.int64)) * tile_q
    rows = np.minimum(first[:, None] + np.arange(0, tile_q + 1, min(64, tile_q)), q_len)
    begin, _ = mask.interval(np.minimum(rows[:, :-1], q_len - 1), q_len, kv_len)
    _, end = mask.interval(np.maximum(rows[:, 1:] - 1, 0), q_len, kv_len)
    return begin, np.where(rows[:, 1:] > rows[:, :-1], end, begin)


# Bytes of keys and values, fitted to timings on an H200 (perf/notes/attn_fwd.md): of a group, of the last group at most, and of
# one head so long that its tiles keep each other company and only the balance counts.
_GROUP_BYTES, _LAST_BYTES, _LONG_BYTES = 4 << 20, 40 << 20, 8 << 20
_LAST_TILES = 4  # of a multiprocessor in the last group, where tiles are of different lengths


def head_groups(problem: Problem, tile_q: int, device: Device) -> tuple[int, int]:
    """Query heads whose tiles are taken together, so that their keys and values are still in L2 when the next tile needs them,
    and the number of such groups before the last one, which takes the rest: enough tiles for the multiprocessors to even out."""
    heads, q_tiles = problem.heads * problem.batch, max(1, -(-problem.q_len // tile_q))
    kv_bytes = max(1, problem.kv_len * (problem.head_dim + problem.head_dim_v) * problem.element.itemsize)
    one_each = -(-device.sm_count // q_tiles)
    group, last = max(1, _GROUP_BYTES // kv_bytes) * problem.heads_per_kv, one_each
    if not isinstance(problem.mask, Full):
        last = -(-_LAST_TILES * device.sm_count // q_tiles)
        if kv_bytes >= _LONG_BYTES:
            group = last
        else:
            last = max(one_each, min(last, _LAST_BYTES // kv_bytes * problem.heads_per_kv))
    return min(group, heads), max(0, heads - last) // group


def values(problem: Problem, config: Any, device: Device) -> dict[str, float]:
    """The fields of Args that follow from the problem alone."""
    found: dict[str, float] = {
        "scale": abs(problem.scale),
        "heads": problem.heads,
        "heads_per_kv": problem.heads_per_kv,
        "batches": problem.batch,
        **problem.mask.values,
        **problem.score.values,
    }
    if problem.varlen:
        return found | {"total_q": problem.total_q}
    found |= {"q_len": problem.q_len, "kv_len": problem.kv_len, "q_tiles": -(-problem.q_len // config.tile_q)}
    found["l2_head_group"], found["last_group"] = head_groups(problem, config.tile_q, device)
    return found
