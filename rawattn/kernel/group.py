"""Into how many parts, works of their own, kernels of the backward split the query heads that share a key head, and in which
order a work goes over their tiles.

A work of such a kernel is a key tile. With few key heads there are fewer works than multiprocessors, or few works of very
different lengths. Parts of the heads are more works, and shorter ones, but dk and dv are then sums of parts in scratch, which a
pass adds. What a number of parts takes is found by going through the works as multiprocessors do."""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import Any

import numpy as np

from ..device import Device
from ..operation import Forward
from ..variant import Option
from ..variant.mask import Full, Pairs
from ..variant.walk import QIntervalByTiles, QIntervalWalk, lists

WALKS: dict[str, Option] = {"by_heads": QIntervalWalk(), "by_tiles": QIntervalByTiles()}

# perf/notes/attn_bwd.md, "Parts of a group of heads"
MOST_WORKS = 8  # of each block that runs at once: with more of them nothing is split, nor into more
START = 1.5  # steps that a work takes besides its own
PART_START = 0.5  # steps besides these where it leaves parts
SUM_RATE = 27e9  # bytes a second of a multiprocessor, of parts that are written and read
SUM_START = 4e-6  # seconds
SAMPLED = 256  # query tiles


def divisors(op: Forward) -> list[int]:
    """The numbers of equal parts of the query heads of a key head."""
    return [n for n in range(1, op.heads_per_kv + 1) if op.heads_per_kv % n == 0]


def wrong(op: Forward, config: Any) -> str | None:
    """The reason why the query heads of a key head cannot be split so, or their tiles not be taken in this order; None where they
    can."""
    if config.parts and config.parts not in divisors(op):
        return f"parts is {config.parts}; it must be 0 or divide the {op.heads_per_kv} query heads of a key head"
    walk = getattr(config, "walk", "")
    if walk not in ("", *WALKS) or (walk == "by_tiles" and _differs_by_head(op)):
        return f"walk is {walk!r}; it must be of {[*WALKS]}, and 'by_tiles' needs one mask for all heads that is no list"
    return None


def kind_of(config: Any, op: Forward, parts: int) -> Any:
    """The configuration of a source: how many parts there are is a run-time number, but for 1."""
    walk = {"walk": config.walk or walk_of(op)} if hasattr(config, "walk") else {}
    return dataclasses.replace(config, parts=min(parts, 2), **walk)


def walk_of(op: Forward) -> str:
    """All heads of a query tile together, where a mask leaves key tiles different numbers of these: works that add to the same
    tiles of dq in turns then go in step."""
    return "by_heads" if op.heads_per_kv == 1 or _differs_by_head(op) or isinstance(op.mask, Full) else "by_tiles"


def _differs_by_head(op: Forward) -> bool:
    """Says whether heads visit tiles of their own."""
    return lists(op.mask) or hasattr(op.mask, "of_head")


def parts(op: Forward, tile_q: int, tile_kv: int, device: Device, seconds: float, ctas_per_sm: int = 1) -> int:
    """How many parts take the least time, where all works would take ``seconds`` if multiprocessors were never idle."""
    blocks, rows = device.sm_count * ctas_per_sm, op.kv_heads * (op.total_kv if op.varlen else op.batch * op.kv_len)
    tried = [n for n in divisors(op) if n == 1 or n * _works(op, tile_kv) <= MOST_WORKS * blocks]
    if len(tried) == 1 or not op.total_q or not op.total_kv:
        return 1
    steps = np.concatenate([np.tile(_steps(op.spec.placed_mask, *each, tile_q, tile_kv), n) for n, each in _sequences(op)])
    step = seconds * blocks / max(1.0, steps.sum() * op.heads)
    part_bytes = 2 * rows * (op.head_dim + op.head_dim_v) * op.element.lse_bytes

    def time_of(n: int) -> float:
        works = np.repeat(steps, op.kv_heads * n) * (op.heads_per_kv // n) + START + PART_START * (n > 1)
        return step * makespan(works, blocks) + (SUM_START + n * part_bytes / (SUM_RATE * device.sm_count)) * (n > 1)

    return min(tried, key=time_of)


def _sequences(op: Forward) -> list[tuple[int, tuple[int, int]]]:
    """How many sequences have which lengths. Of packed ones one has the longest, and the others the mean of the rest."""
    longest = op.q_len, op.kv_len
    if not op.varlen or op.batch <= 1:
        return [(op.batch, longest)]
    rest = [max(0, total - most) // (op.batch - 1) for total, most in zip((op.total_q, op.total_kv), longest, strict=True)]
    return [(1, longest), (op.batch - 1, (rest[0], rest[1]))]


def _works(op: Forward, tile_kv: int) -> int:
    """The key tiles of all key heads."""
    return op.kv_heads * sum(n * -(-kv_len // tile_kv) for n, (_, kv_len) in _sequences(op))


@functools.lru_cache(maxsize=256)
def _steps(mask: Pairs, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> np.typing.NDArray[np.float64]:
    """How many query tiles keep keys of each key tile, of one query head; long sequences are sampled."""
    found = np.zeros(-(-kv_len // tile_kv) + 1)
    if q_len == 0 or kv_len == 0:
        return found[:-1]
    last = (q_len - 1) // tile_q
    tiles = np.unique(np.linspace(0, last, min(SAMPLED, last + 1)).astype(np.int64))
    begin, _ = mask.interval(tiles * tile_q, q_len, kv_len)
    _, end = mask.interval(np.minimum((tiles + 1) * tile_q, q_len) - 1, q_len, kv_len)
    kept = end > begin
    each = (last + 1) / len(tiles)
    np.add.at(found, begin[kept] // tile_kv, each)
    np.subtract.at(found, -(-end[kept] // tile_kv), each)
    return np.cumsum(found)[:-1]


def makespan(works: np.typing.NDArray[np.float64], blocks: int) -> float:
    """The time of works on blocks that run together, the longest first."""
    ends = [0.0] * blocks
    for work in np.sort(works)[::-1].tolist():
        heapq.heapreplace(ends, ends[0] + work)
    return max(ends)
