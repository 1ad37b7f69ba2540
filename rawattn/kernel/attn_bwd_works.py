"""The works of attn_bwd.cu: into which parts they are cut, in which order they go, and to how many sums they add, by what is
expected of sizes, and the reasons against what a configuration says of that. ``group.py`` has parts of query heads."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..operation import Backward, Forward
from ..variant.mask import Causal, Full
from ..variant.walk import lists
from . import backward, group, tiling

if TYPE_CHECKING:
    from .attn_bwd import AttnBwdConfig

NUMBERS_OF_SUMS = (1, 2, 4, 8)  # of a tile of dq
# Microseconds at head_dim 128, fitted to timings on an H200 (perf/notes/attn_bwd.md): from a block's add to a tile of dq to the
# next block's, where all add at once; a step; what a work takes besides.
HOP, STEP, WORK = 3.0, 2.1, 5.0
TURN, ROUND = 2.0, 3.0  # the same hop where the key tiles of a head begin together; what a work takes besides where they go round
# The same of works that go round in parts of the query tiles: a step, a hop where key tiles are as many as query tiles, a number
# of a part, written and added; the pass that adds them, and others. Under a causal mask, times of parts over these, and of one.
PART_STEP, PART_HOP, PART_NUMBER, SUM, PASSES = 2.05, 2.4, 4e-6, 3.0, 10.0
CAUSAL_PARTS, CAUSAL_WHOLE = 0.91, 0.97
COLUMNS_OF_PARTS = range(65, 129)  # head sizes whose query tiles are split (perf/notes/attn_bwd.md)
MOST_QUERY_PARTS = 4
BANDS, MORE_BANDS, FEW_WORKS = 2, 4, 0.34  # parts along the diagonal; the more where a block has fewer whole key tiles
# Columns up to which a turn takes longer than the two steps between key tiles, and the sums of a tile that then share turns.
NARROW, SUMS_OF_NARROW = 64, 2
LEAST_KEY_TILES, MOST_HEADS = 8, 6  # key tiles of a head from which on that was modelled; beyond, adding parts takes too long
MOST_OF_ONE = 2  # works a block of one head; at four, 200 MB of scratch would gain 5 % at head_dim 128
# Query tiles for each head, by parts, from which on they are worth more than the last contributor who finishes dq.
TILES_OF_HEAD = {BANDS: 16, MORE_BANDS: 8}
MOST_NARROW = 3  # works of a block, up to which that was modelled
FEW_KEY_HEADS, FEW_HEADS = 16, 4  # and query heads of each, up to which works take tiles of all heads together (a model with L2)
MOST_BUNDLE = 64
BUNDLE = 2  # works of a block: with so many, their Q, dO and dq are 35 MB at head_dim 128
MOST_WAVES = 8  # works of a block, up to which packed sequences go round
MOST_HOPS = 0.4  # of a launch's time, in which the adds to one sum follow each other: with more of them blocks queue


def _refuse_rounds(config: AttnBwdConfig, op: Backward) -> str | None:
    """The reason why key tiles cannot begin their rounds at different query tiles, where the configuration says so; None where
    they can."""
    if config.walk != "rotated":
        return None
    forward = op.forward
    masks = Full if forward.varlen else (Full, Causal)
    if not isinstance(forward.mask, masks) or not forward.has_plain_score or config.gradient or config.bundle > 0:
        return (
            "walk is 'rotated'; it needs a full mask, or a causal one and one length, a score without arrays, and a bundle of 0"
        )
    if config.direction not in ("", "Ascending") or not group.adds_in_turns(config):
        return "walk is 'rotated'; it needs direction 'Ascending', and adds to dq in one order"
    return None


def _refuse_together(config: AttnBwdConfig, op: Forward) -> str | None:
    """The reason why heads, or packed sequences, cannot be taken together as the configuration says; None where they can."""
    if config.heads_together < 0 or (config.heads_together and (op.varlen or config.walk == "rotated")):
        return (
            f"heads_together is {config.heads_together}; it must be 0, or more for sequences of one length that do not go round"
        )
    is_served = op.varlen and isinstance(op.mask, Full) and not config.direction
    if config.bundle not in (-1, 0) and not (is_served and 0 < config.bundle <= MOST_BUNDLE):
        where = "packed sequences without a mask, of no direction"
        return f"bundle is {config.bundle}; it must be 0 or -1, or up to {MOST_BUNDLE} for {where}"
    return None


def _refuse_query_parts(config: AttnBwdConfig, op: Backward) -> str | None:
    """The reason why the query tiles of a key tile cannot be split; None where they can. A work of a part goes round."""
    if config.query_parts in (0, 1) or config.walk == "bands":
        return None
    others = (
        op.forward.varlen
        or config.parts > 1
        or config.walk not in ("", "rotated")
        or config.heads_together
        or op.forward.spec.dropout
    )
    most = _most_query_parts(config, op.forward)
    goes_round = _refuse_rounds(dataclasses.replace(config, walk="rotated"), op) is None
    if not 0 <= config.query_parts <= max(1, most) or others or not goes_round:
        needs = f"several, up to {most} here, need one length and what walk 'rotated' needs, without dropout"
        return f"query_parts is {config.query_parts}; {needs}"
    return None


def _most_query_parts(config: AttnBwdConfig, op: Forward) -> int:
    return min(-(-op.q_len // config.tile_q), tiling.MOST_TILES // max(1, backward.kv_tiles(op, config.tile_kv)))


def _refuse_bands(config: AttnBwdConfig, op: Backward) -> str | None:
    """The reason why query tiles cannot be in parts along the diagonal, where the configuration says so; None where they can."""
    if config.walk != "bands":
        return None
    forward, parts = op.forward, config.query_parts or BANDS
    is_served = isinstance(forward.mask, Causal) and not forward.varlen and forward.has_plain_score and not forward.spec.dropout
    others = config.parts > 1 or config.heads_together or config.gradient or config.bundle > 0
    adds = config.store == "ordered" and config.direction in ("", "Alternating")
    most = max(BANDS, _most_query_parts(config, forward))
    if is_served and adds and not others and 1 < parts <= most and config.dq_sums % parts == 0:
        return None
    needs = f"a causal mask, one length, 2 to {most} query_parts here, so many dq_sums or times as many, and store 'ordered'"
    return f"walk is 'bands' with query_parts {parts} and dq_sums {config.dq_sums}; it needs {needs}"


def _refuse_uneven(config: AttnBwdConfig, op: Backward) -> str | None:
    """The reason why parts of query heads cannot differ by a head, where the configuration says so; None where they can."""
    forward = op.forward
    is_served = isinstance(forward.mask, (Causal, Full)) and not forward.varlen and not config.gradient and config.dq_sums < 2
    if config.walk != "uneven" or (is_served and 1 < config.parts <= forward.heads_per_kv and config.query_parts < 2):
        return None
    needs = f"a full or causal mask, one length, 2 to {forward.heads_per_kv} parts, and one sum of each tile of dq"
    return f"walk is 'uneven' with parts {config.parts}; it needs {needs}"


def _has_odd_groups(op: Forward, batch: int) -> bool:
    """Says whether groups have five or seven heads, and so many sequences have few of them, of widths that were modelled."""
    is_known = op.heads_per_kv in (5, 7) and op.widest <= COLUMNS_OF_PARTS[-1]
    return is_known and op.kv_heads * batch <= FEW_KEY_HEADS // 2


def _suits_uneven(op: Backward, config: AttnBwdConfig, blocks: int) -> bool:
    """Says whether groups of five or seven heads should have two parts that differ by a head (perf/notes/attn_bwd.md): in long
    sequences, where ``group.parts`` would take two if they were equal, and equal ones are too many."""
    forward, works = op.forward, backward.kv_tiles(op.forward, config.tile_kv)
    is_asked = config.walk or config.parts or config.query_parts or config.dq_sums or config.heads_together
    is_odd = _has_odd_groups(forward, forward.batch)
    is_long = _is_square(forward) and forward.q_len >= group.LONG and group.adds_in_turns(config)
    enough = group.ENOUGH_OF_LONG * blocks
    if is_asked or not (is_odd and is_long and works < enough <= 2 * works):
        return False
    return _refuse_uneven(dataclasses.replace(config, walk="uneven", parts=2), op) is None


def _may_have_sums(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether a tile of dq may have several sums: where contributors are counted, and a pass makes dq."""
    return config.store == "ordered" and (not lists(op.mask) or op.keys is not None)


def _has_few_queries(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether the sizes are a kind for which kernels with several sums of a tile of dq are compiled."""
    return not (op.varlen or lists(op.mask)) and op.kv_len >= 8 * op.q_len and _may_have_sums(op, config)


def _has_narrow_turns(op: Forward, config: AttnBwdConfig) -> bool:
    """Says whether key tiles next to each other come to a tile of dq faster than turns go on, where there are as many keys as
    queries: heads are narrow, and tiles small, as they are where works are few."""
    is_causal = _is_whole_causal(op) and op.heads_per_kv == 1
    is_plain = op.has_plain_score and not op.spec.dropout and op.widest <= NARROW and config.consumers == 2
    return is_causal and is_plain and not config.gradient and _may_have_sums(op, config)


def _refuse_sums(config: AttnBwdConfig, op: Forward) -> str | None:
    """The reason why a tile of dq cannot have so many sums; None where it can."""
    most = tiling.MOST_TILES // max(1, config.dq_chains * op.heads * backward.q_blocks(op, config.tile_q))
    if config.dq_sums in (0, 1) or (1 < config.dq_sums <= most and _may_have_sums(op, config)):
        return None
    return f"dq_sums is {config.dq_sums}; up to {most} are counted, and several need store 'ordered', and no list by a mask"


def _count_sums(op: Forward, config: AttnBwdConfig, blocks: int) -> int:
    """The sums of each tile of dq that keep ``blocks`` from queuing for them.

    Few works of narrow causal heads have two. Else those beside the first take at most a tenth of what k and v do, so that there
    are some only where queries are far fewer than keys, which is where blocks queue (perf/notes/attn_bwd.md)."""
    has_few = _is_square(op) and backward.kv_tiles(op, config.tile_kv) <= MOST_NARROW * blocks
    if has_few and _has_narrow_turns(op, config):
        return SUMS_OF_NARROW
    if not _has_few_queries(op, config):
        return 1
    tiles = op.heads * backward.q_blocks(op, config.tile_q)
    time = op.batch * op.kv_heads / blocks * (-(-op.q_len // config.tile_q) * op.heads_per_kv * STEP + WORK)  # a key tile
    of_sum = tiles * config.tile_q * config.dq_columns * config.dq_parts * 4
    of_keys = op.batch * op.kv_len * op.kv_heads * (op.head_dim + op.head_dim_v) * op.element.itemsize
    fitting = [n for n in NUMBERS_OF_SUMS if (n - 1) * of_sum * 10 <= of_keys]
    return next((n for n in fitting if HOP / n <= MOST_HOPS * time), fitting[-1])


def _goes_round(op: Backward, config: AttnBwdConfig, blocks: int) -> bool:
    """Says whether key tiles go round, by what is expected: works that begin together wait for the key tiles before them once, a
    hop each, and rounds wait for nobody, but a block has its works beforehand, in windows (perf/notes/attn_bwd.md)."""
    forward, parts = op.forward, config.parts  # rounds of parts of heads were not timed
    kv_tiles, q_tiles = -(-forward.kv_len // config.tile_kv), -(-forward.q_len // config.tile_q)
    rotated = dataclasses.replace(config, walk="rotated", direction="")
    is_square = isinstance(forward.mask, Full) and not forward.varlen and 8 <= kv_tiles <= q_tiles / 1.5
    if parts > 1 or config.heads_together or _refuse_rounds(rotated, op) is not None:
        return False
    if not is_square:
        return False
    heads, work = forward.kv_heads * forward.batch, q_tiles * forward.heads_per_kv * STEP
    windows = -(-kv_tiles // blocks)
    rounds = -(-heads // max(1, blocks // -(-kv_tiles // windows))) * windows
    return rounds * (work + ROUND) < -(-heads * kv_tiles // blocks) * work + kv_tiles * TURN


def _sums_of_parts(op: Forward, config: AttnBwdConfig) -> int:
    """The sums of a tile of dq where query tiles are in parts that go round: two where a pass makes dq, as key tiles that run at
    once are as many as the query tiles of a part, and a turn takes longer than a step (perf/notes/attn_bwd.md). Of a group of
    query heads they would take several times what parts of dk and dv do, and no model has them."""
    has_two = config.store == "ordered" and isinstance(op.mask, Full) and op.heads_per_kv == 1
    return config.dq_sums or (2 if has_two else 1)


def _count_query_parts(op: Backward, config: AttnBwdConfig, blocks: int) -> int:
    """The parts of the query tiles of a key tile by which works end soonest, by what is expected of them; one where others save
    less than a twentieth of all launches' time (perf/notes/attn_bwd.md)."""
    forward = op.forward
    sums = _sums_of_parts(forward, config)
    is_known = forward.widest in COLUMNS_OF_PARTS or (forward.widest <= NARROW and sums > 1 and config.consumers == 2)
    if (
        not (is_known and forward.total_q and forward.total_kv)
        or _refuse_query_parts(dataclasses.replace(config, query_parts=2), op) is not None
    ):
        return 1
    kv_tiles, heads = -(-forward.kv_len // config.tile_kv), forward.kv_heads * forward.batch
    columns = forward.head_dim + forward.head_dim_v
    of_step = forward.heads_per_kv * (1 + columns / 256) / 2

    def expect_rounds(parts: int) -> float:
        tiles = _part_tiles(forward, config, parts)
        windows = -(-kv_tiles // min(kv_tiles, tiles, blocks))
        at_once = -(-kv_tiles // windows)
        rounds = -(-heads * parts // max(1, blocks // at_once)) * windows
        added = SUM + parts * heads * forward.kv_len * columns * PART_NUMBER if parts > 1 else 0
        return PASSES + rounds * tiles * of_step * max(PART_STEP, PART_HOP / sums * at_once / tiles) + added

    expected = {parts: expect_rounds(parts) for parts in range(1, min(MOST_QUERY_PARTS, _part_tiles(forward, config, 1)) + 1)}
    if not isinstance(forward.mask, Full):  # works of one part are shared out as blocks end, the longest first
        expected = {parts: CAUSAL_PARTS * us for parts, us in expected.items()}
        longest, steps = _part_tiles(forward, config, 1), heads * forward.pairs / (config.tile_q * config.tile_kv)
        expected[1] = CAUSAL_WHOLE * (PASSES + max(longest, steps / blocks) * of_step * PART_STEP)
    best = min(expected, key=expected.__getitem__)
    return best if expected[best] < 0.95 * expected[1] else 1


def _is_whole_causal(op: Forward) -> bool:
    """Says whether the mask is causal, of whole sequences of one length."""
    return isinstance(op.mask, Causal) and not (op.varlen or any(op.lens)) and op.spec.offsets is None


def _is_square(op: Forward) -> bool:
    """Says whether such sequences have as many keys as queries."""
    return _is_whole_causal(op) and op.q_len == op.kv_len


def _has_few_groups(op: Forward) -> bool:
    """Says whether key heads, and query heads of each, are so few that L2 holds what works of all of them use at a query tile."""
    return _is_square(op) and op.kv_heads * op.batch <= FEW_KEY_HEADS and 1 < op.heads_per_kv <= FEW_HEADS


def suits_bands(op: Forward, tile_kv: int, blocks: int) -> bool:
    """Says whether works of whole key tiles are so few, or begin so, that parts along the diagonal end sooner. Of few heads the
    longest is most of a launch, and of one head alone all key tiles would begin at the same query tile."""
    heads, kv_tiles = op.kv_heads * op.batch, -(-op.kv_len // tile_kv)
    is_square = _is_square(op) and op.heads_per_kv == 1
    most = MOST_OF_ONE if heads == 1 else 1
    is_few = kv_tiles >= LEAST_KEY_TILES and heads <= MOST_HEADS and heads * kv_tiles <= most * blocks
    return is_square and is_few and op.widest <= COLUMNS_OF_PARTS[-1]


def _count_bands(op: Backward, config: AttnBwdConfig, blocks: int) -> int:
    """The parts along the diagonal in which works end soonest, one where others gain nothing (perf/notes/attn_bwd.md)."""
    forward = op.forward
    if config.walk == "bands":
        return config.query_parts or BANDS
    is_asked = config.walk or config.query_parts or config.dq_sums
    if is_asked or not suits_bands(forward, config.tile_kv, blocks):
        return 1
    if _refuse_bands(dataclasses.replace(config, walk="bands"), op) is not None:
        return 1
    return MORE_BANDS if backward.kv_tiles(forward, config.tile_kv) <= FEW_WORKS * blocks else BANDS


def needs_bands(op: Backward, config: AttnBwdConfig, blocks: int) -> bool:
    """Says whether parts along the diagonal are worth more than a last contributor who finishes dq, which has no place there."""
    parts = _count_bands(op, dataclasses.replace(config, store="ordered"), blocks)
    heads, q_tiles = op.forward.heads * op.forward.batch, -(-op.forward.q_len // config.tile_q)
    return parts > 1 and q_tiles >= heads * TILES_OF_HEAD.get(parts, 0)


def _place_packed(op: Backward, config: AttnBwdConfig, is_asked: str, blocks: int) -> AttnBwdConfig:
    """The configuration in which packed sequences without a mask are side by side; where they are alike or one has most of all
    pairs, and heads have more than 64 columns, they go round if a block has few works, and else come one after the other. So do
    works of several query heads, and those of wide heads, of which nothing was timed (perf/notes/attn_bwd.md)."""
    forward, (after, beside) = op.forward, (dataclasses.replace(config, bundle=n) for n in (0, BUNDLE))
    is_served = not is_asked and forward.heads_per_kv <= config.parts and forward.widest <= COLUMNS_OF_PARTS[-1]
    if not is_served or _refuse_together(beside, forward) is not None:
        return after
    others = (forward.total_q - forward.q_len) / max(1, forward.batch - 1)
    is_long = others >= 0.9 * forward.q_len or forward.q_len**2 >= 4 * (forward.batch - 1) * others**2
    is_known = forward.batch == 1 or forward.q_len < forward.total_q
    if not (is_long and is_known and forward.kv_len >= 8 * config.tile_kv and forward.widest in COLUMNS_OF_PARTS):
        return beside
    rotated = dataclasses.replace(after, walk="rotated")
    has_few = forward.total_kv * forward.kv_heads * config.parts <= MOST_WAVES * config.tile_kv * blocks
    return rotated if has_few and _refuse_rounds(rotated, op) is None else after


def count_kept_keys(op: Forward) -> float:
    """The keys that a query keeps, on average. Where the length of the longest packed sequence is known, the others are taken to
    be alike: most queries may be of few sequences."""
    if not op.varlen or op.batch < 2 or not op.q_len < op.total_q or not op.kv_len < op.total_kv:
        return op.pairs / max(1, round(op.total_q / max(1, op.batch)))
    longest = dataclasses.replace(op, batch=1, total_q=op.q_len, total_kv=op.kv_len)
    others = dataclasses.replace(op, batch=op.batch - 1, total_q=op.total_q - op.q_len, total_kv=op.total_kv - op.kv_len)
    return (longest.pairs + others.batch * others.pairs) / op.total_q


def _choose_direction(op: Forward, config: AttnBwdConfig) -> str:
    """The order of works of packed sequences under a causal mask: with a head for each key head short sequences descend, since
    those whose works all begin at the last query tile wait for each other; parts of heads that go in step have the longest
    first."""
    if not op.varlen or not isinstance(op.mask, Causal) or not group.adds_in_turns(config):
        return ""
    in_step = config.parts > 1 and config.walk == "by_tiles"
    return "AlternatingLong" if op.heads_per_kv == 1 else "LongestFirst" if in_step else ""


def _part_tiles(op: Forward, config: AttnBwdConfig, parts: int) -> int:
    """The query tiles of one of so many parts."""
    return -(-op.q_len // (config.tile_q * parts))


def _window_values(op: Forward, config: AttnBwdConfig, blocks: int) -> dict[str, float]:
    """The run-time numbers of key tiles that go round: equal windows of a head, each of as many key tiles as begin at query tiles
    of their own, and equal groups of as many heads as ``blocks`` have windows for."""
    if config.walk != "rotated" or op.varlen:
        return {}
    blocks = max(1, blocks)  # none without keys
    kv_tiles, q_tiles = max(1, -(-op.kv_len // config.tile_kv)), max(1, _part_tiles(op, config, config.query_parts))
    window = -(-kv_tiles // -(-kv_tiles // min(kv_tiles, q_tiles, blocks)))
    heads = max(1, op.kv_heads * op.batch * config.parts * config.query_parts)
    groups = -(-heads // max(1, blocks // window))
    size = -(-heads // groups)
    return {
        "l2_head_group": size, "last_group": -(-heads // size) - 1, "window_tiles": window,
        "q_stride": min(256 * q_tiles // window, (1 << 31) - 1),
    }  # fmt: skip


def wrong(op: Backward, config: AttnBwdConfig) -> str | None:
    """The reason why works cannot be as ``config`` says; None where they can."""
    together = _refuse_sums(config, op.forward) or _refuse_together(config, op.forward) or _refuse_bands(config, op)
    together = together or _refuse_uneven(config, op)
    return _refuse_rounds(config, op) or together or _refuse_query_parts(config, op)


def resolved(op: Backward, config: AttnBwdConfig, blocks: int) -> AttnBwdConfig:
    """The configuration with what sizes suggest where it says nothing."""
    forward, is_asked = op.forward, config.walk
    if (bands := _count_bands(op, config, blocks)) > 1:
        sums = config.dq_sums or bands * (SUMS_OF_NARROW if _has_narrow_turns(forward, config) else 1)
        return dataclasses.replace(config, walk="bands", query_parts=bands, parts=1, dq_sums=sums, bundle=0)
    if config.walk == "uneven" or _suits_uneven(op, config, blocks):
        return dataclasses.replace(config, walk="uneven", parts=config.parts or 2, query_parts=1, dq_sums=1, bundle=0)
    if config.query_parts > 1:
        config = dataclasses.replace(config, parts=1, dq_sums=_sums_of_parts(forward, config))
    works, is_few = backward.kv_tiles(forward, config.tile_kv), _has_few_groups(forward)
    config = group.resolved(forward, config, works, config.tile_kv, blocks, is_few)
    if config.query_parts == 0:
        n = _count_query_parts(op, dataclasses.replace(config, walk=is_asked), blocks)
        config = dataclasses.replace(config, query_parts=n, dq_sums=_sums_of_parts(forward, config) if n > 1 else config.dq_sums)
    if config.bundle < 0:
        config = _place_packed(op, config, is_asked, blocks)
    walk = "rotated" if config.query_parts > 1 or (not is_asked and _goes_round(op, config, blocks)) else config.walk
    direction = config.direction or _choose_direction(forward, config)
    count = config.dq_sums or _count_sums(forward, config, blocks)
    is_full = bool(forward.spec.dropout) and config.consumers == 3 and walk == "by_tiles"  # registers are, for two loops
    steps = "together" if is_full else config.steps
    return dataclasses.replace(config, walk=walk, direction=direction, dq_sums=count, steps=steps)


def kinds(op: Backward, config: AttnBwdConfig) -> list[AttnBwdConfig]:
    """The configurations that lengths may make of ``config``: with one sum of each tile of dq, several where lengths may ask for
    them; rounds, and parts of query tiles and of query heads; packed sequences side by side."""
    forward, narrow = op.forward, _has_narrow_turns(op.forward, config)
    several = config.dq_sums == 0 and (_has_few_queries(forward, config) or narrow)
    plain = dataclasses.replace(config, query_parts=max(1, config.query_parts), bundle=max(0, config.bundle))
    found = [dataclasses.replace(plain, dq_sums=n) for n in (1, 2)] if several else [plain]
    rotated = dataclasses.replace(plain, parts=1, walk="rotated", dq_sums=1)
    if not forward.varlen and not config.walk and _refuse_rounds(rotated, op) is None:
        sums = _sums_of_parts(forward, config)
        is_known = forward.widest in COLUMNS_OF_PARTS or (forward.widest <= NARROW and sums > 1 and config.consumers == 2)
        is_split = config.query_parts == 0 and is_known and not forward.spec.dropout
        of_parts = dataclasses.replace(rotated, query_parts=2, dq_sums=sums)
        found += [rotated] * isinstance(forward.mask, Full) + [of_parts] * is_split
    bands = dataclasses.replace(plain, parts=1, walk="bands", query_parts=BANDS, dq_sums=BANDS)
    is_asked = config.walk or config.query_parts or config.dq_sums
    has_few = forward.heads_per_kv == 1 and forward.kv_heads <= MOST_HEADS and forward.widest <= COLUMNS_OF_PARTS[-1]
    if has_few and not is_asked and _is_whole_causal(forward) and _refuse_bands(bands, op) is None:
        found.append(bands)
    uneven = dataclasses.replace(plain, parts=2, walk="uneven", dq_sums=1)
    is_odd = _is_whole_causal(forward) and group.adds_in_turns(config) and _has_odd_groups(forward, 1)
    is_asked = config.walk or config.parts or config.query_parts or config.dq_sums
    if is_odd and not is_asked and _refuse_uneven(uneven, op) is None:
        found.append(uneven)
    beside = dataclasses.replace(plain, bundle=BUNDLE)
    is_placed = config.bundle < 0 and not config.walk and forward.widest <= COLUMNS_OF_PARTS[-1]
    if is_placed and _refuse_together(beside, forward) is None:
        found.append(beside)
        around = dataclasses.replace(plain, walk="rotated")
        found += [around] * (_refuse_rounds(around, op) is None)
    return found


def _most_together(op: Forward, config: AttnBwdConfig, sums: int, blocks: int) -> int:
    """The most heads whose key tiles are taken together, 0 for as many as there are blocks. Of few queries and wide heads L2 does
    not hold Q, dO and dq of so many (perf/notes/attn_bwd.md)."""
    has_few = 0 < sums < -(-op.kv_len // config.tile_kv)
    return config.heads_together or (max(1, blocks // 2) if has_few and op.widest >= COLUMNS_OF_PARTS[0] else 0)


def band_values(op: Forward, config: AttnBwdConfig) -> dict[str, float]:
    """The run-time numbers of parts along the diagonal."""
    parts = config.query_parts
    return {"group_parts": parts, "part_tiles": _part_tiles(op, config, parts)} if config.walk == "bands" else {}


def values(op: Forward, config: AttnBwdConfig, sm_count: int, grid: int) -> dict[str, float]:
    """The run-time numbers that set parts and the order of works."""
    parts, sums = config.parts * config.query_parts, group.sums(op, config, config.parts)
    numbers = backward.kv_order(op, config.tile_kv, sm_count, parts, sums)
    if config.walk == "bands":
        return numbers | {"heads_per_kv": op.heads_per_kv, **band_values(op, config)}
    if config.walk == "uneven":  # as if each part were a head
        return numbers | {"heads": op.kv_heads * parts, "heads_per_kv": 1, "group_heads": op.heads_per_kv}
    if config.query_parts > 1:  # as if there were so many heads, and each had some query tiles
        of_parts = {"heads": op.heads * parts, "heads_per_kv": op.heads_per_kv}
        numbers |= of_parts | {"part_tiles": _part_tiles(op, config, parts)}
    most = _most_together(op, config, sums, sm_count)
    if config.walk != "rotated" and most and (config.heads_together or most < numbers["l2_head_group"]):
        heads = max(1, op.kv_heads * op.batch * parts)
        size = min(most, heads)
        numbers |= {"l2_head_group": size, "last_group": heads // size - 1}
    if config.bundle:
        numbers |= {"bundle_works": config.bundle * sm_count}
    return numbers | _window_values(op, config, grid)
