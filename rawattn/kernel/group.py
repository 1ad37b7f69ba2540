"""The parts, works of their own, into which kernels of the backward split the query heads that share a key head, and the order in
which a work goes over their tiles.

A work of such a kernel is a key tile. With few key heads there are fewer works than multiprocessors, or too few of different
lengths to end together. Parts of the heads are more works, and shorter ones, but dk and dv are then sums of parts in scratch,
which a pass adds. What follows is from perf/notes/attn_bwd.md, "Parts of a group of heads"."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..operation import Forward
from ..variant import Option
from ..variant.intervals import differs_by_head
from ..variant.mask import Causal, Full
from ..variant.walk import QIntervalBand, QIntervalByTiles, QIntervalRotated, QIntervalUneven, QIntervalWalk, lists

WALKS: dict[str, Option] = {
    "by_heads": QIntervalWalk(), "by_tiles": QIntervalByTiles(), "rotated": QIntervalRotated(), "bands": QIntervalBand(),
    "uneven": QIntervalUneven(),
}  # fmt: skip

# Works for each block that runs at once, up to which heads are split. A causal mask's longest work takes twice the mean of all:
# with two a block none lasts beyond the others. Without a mask all take the same, but a work begins when those of all key tiles
# before it have had their turns to add to dq: half as many of them at once, half as long. Elsewhere one a block is enough. Packed
# sequences come one after the other, not the longest works of all first, and need twice as many.
# From LONG queries on, more of them: then fewer heads' Q and dO are read at a time, and L2 holds them.
ENOUGH, ENOUGH_OF_EQUAL, ENOUGH_OF_LONG, LONG = 1.9, 0.9, 4.0, 8192
MOST = 8  # with more than these nothing is split; their parts take 138 MB of scratch at head_dim 128 on 132 multiprocessors
MOST_PACKED, PACKED_PARTS = 24, 4  # the same of packed sequences; their parts, of which eight lost (perf/notes/attn_bwd.md)
LONGEST_WORK = {True: 0.42, False: 0.6}  # of a block's share of all steps, for causal masks and others
SHORT = 2176  # queries of packed sequences, up to which works take tiles of all heads together


def divisors(op: Forward) -> list[int]:
    """The numbers of equal parts of the query heads of a key head; lists of tiles are made for all of them."""
    most = 1 if lists(op.mask) else op.heads_per_kv
    return [n for n in range(1, most + 1) if op.heads_per_kv % n == 0]


def wrong(op: Forward, config: Any) -> str | None:
    """The reason why the query heads of a key head cannot be split into ``config.parts``, or their tiles not be taken in order
    ``config.walk``; None where they can."""
    uneven = getattr(config, "walk", "") == "uneven" and 1 < config.parts <= op.heads_per_kv
    if config.parts and config.parts not in divisors(op) and not uneven:
        return f"parts is {config.parts}; it must be 0 or of {divisors(op)}, as {op.heads_per_kv} query heads share a key head"
    walk, differ = getattr(config, "walk", ""), op.mask.lists or differs_by_head(op.mask)
    if walk not in ("", *WALKS) or (walk == "by_tiles" and differ):
        return f"walk is {walk!r}; it must be of {[*WALKS]}; by_tiles needs one mask for all heads that is no list"
    return None


def adds_in_turns(config: Any) -> bool:
    """Says whether works add to dq, and in one order."""
    return getattr(config, "store", "unordered") != "unordered"


def parts(op: Forward, config: Any, works: int, blocks: int) -> int:
    """The fewest parts that give blocks enough to do, where there are so many ``works`` of whole groups."""
    if not op.total_q or not op.total_kv:
        return 1
    if op.varlen and isinstance(op.mask, (Causal, Full)) and adds_in_turns(config):
        return packed_parts(op, config, works, blocks)
    many = isinstance(op.mask, Causal) or (isinstance(op.mask, Full) and adds_in_turns(config))
    is_long = isinstance(op.mask, Causal) and adds_in_turns(config) and op.q_len >= LONG and not op.varlen
    enough = ENOUGH_OF_LONG if is_long else (ENOUGH if many else ENOUGH_OF_EQUAL) * (2 if op.varlen else 1)
    fitting = [n for n in divisors(op) if n == 1 or n * works <= MOST * blocks]
    return next((n for n in fitting if n * works >= enough * blocks), fitting[-1])


def packed_parts(op: Forward, config: Any, works: int, blocks: int) -> int:
    """The parts of packed sequences: one where the longest work is not too large a share of what each block has to do, else four
    or as many as fit. Lengths are on the device: one is taken to be as long as the bound, the others alike."""
    causal, rest = isinstance(op.mask, Causal), max(0, op.total_q - op.q_len)
    mean = (op.q_len**2 + rest**2 / max(1, op.batch - 1)) / op.total_q  # queries of a query's own sequence
    longest, tiles = (-(-int(n) // config.tile_q) for n in (op.q_len, mean))
    share = works * ((tiles + 1) / 2 if causal else tiles) / blocks
    if longest <= LONGEST_WORK[causal] * share:
        return 1
    return max(n for n in divisors(op) if n == 1 or (n <= PACKED_PARTS and n * works <= MOST_PACKED * blocks))


def head_groups(heads: int, tiles: int, blocks: int, sums: int = 0) -> tuple[int, int]:
    """The number of heads whose key tiles are taken together, so that each block has one, and the number of such groups.

    Key tiles of a head add in turns to ``sums`` tiles of dq, 0 where they take no turns. Where these are fewer than key tiles,
    blocks would queue for them: half as many blocks as sums work at a head then, and at more heads together."""
    if 0 < sums < tiles:
        tiles = max(1, sums // 2)
    size = max(1, min(heads, -(-blocks // max(1, tiles))))
    return size, max(1, heads // size)


def sums(op: Forward, config: Any, parts: int = 1) -> int:
    """The tiles of dq to which the key tiles of a head, of one of ``parts`` of its query heads, add in turns; 0 where they take
    no turns, and for packed sequences, whose lengths the device knows."""
    return -(-op.q_len // config.tile_q) * op.heads_per_kv // parts if adds_in_turns(config) and not op.varlen else 0


def walks(op: Forward, config: Any) -> list[str]:
    """The orders that sizes may suggest."""
    waits = op.heads_per_kv > 1 and isinstance(op.mask, Causal) and adds_in_turns(config)
    return ["by_heads", "by_tiles"] if waits else ["by_heads"]


def resolved(op: Forward, config: Any, works: int, tile_kv: int, blocks: int, is_few: bool = False) -> Any:
    """The configuration with the parts, and the walk where it has one, that sizes suggest, unless ``config`` says them.

    Under a causal mask works with several heads begin with the longest ones, all of them at the last query tile. Head by head
    these wait for each other's turns to add to dq; with all heads of a query tile together they go in step. L2 holds what is in
    use then for one or three groups of key heads, and where ``is_few`` says that heads are."""
    n = config.parts or parts(op, config, works, blocks)
    _, groups = head_groups(op.kv_heads * op.batch, -(-op.kv_len // tile_kv), blocks, sums(op, config))
    in_step = n > 1 or is_few or (op.q_len <= SHORT if op.varlen else groups in (1, 3))
    return _set_parts(config, n, walks(op, config)[-1 if in_step else 0])


def kinds(op: Forward, config: Any) -> list[Any]:
    """The configurations that sizes may make of ``config``, one for each source: a number of parts above one is a run-time
    number."""
    if config.parts:
        return [config]
    orders = walks(op, config)
    return [_set_parts(config, 1, walk) for walk in orders] + [_set_parts(config, n, orders[-1]) for n in divisors(op)[1:2]]


def _set_parts(config: Any, parts: int, walk: str) -> Any:
    return dataclasses.replace(config, parts=parts, **({"walk": config.walk or walk} if hasattr(config, "walk") else {}))


def source_of(config: Any) -> Any:
    """The configuration that a source is rendered of: all numbers of parts above one share a source."""
    return dataclasses.replace(config, parts=min(config.parts, 2))
