"""The query tiles that visit a key tile, as the backward asks for them: exactly the inverse of the key tiles that a query tile
visits, or blocks that add to dq in turn would wait for ever. And blocks take key tiles in the order of their turns."""

from __future__ import annotations

import ctypes
import itertools
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rawattn.testing.option_checks import MASK, TILES, OnHost, check_inverse
from rawattn.variant.mask import Mask
from tests import native
from tests.host.variant.test_mask import LENGTHS, masks
from tests.host.variant.test_scheduler import ROWS, WRONG, right


@pytest.fixture(autouse=True)
def compiler() -> None:
    native.needs_compiler()


def test_every_small_case() -> None:
    for mask in masks([None, 0, 1, 4]):
        for q_len, kv_len, (tile_q, tile_kv) in itertools.product(range(8), range(8), ((2, 3), (3, 2), (1, 4))):
            check_inverse(mask, q_len, kv_len, tile_q, tile_kv)


@hypothesis.settings(max_examples=400, derandomize=True)
@hypothesis.given(
    st.sampled_from(masks([None, 0, 1, 63, 64, 100, 1000])), LENGTHS, LENGTHS,
    st.sampled_from([64, 128]), st.sampled_from([64, 128, 192]),
)  # fmt: skip
def test_real_sizes(mask: Mask, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> None:
    check_inverse(mask, q_len, kv_len, tile_q, tile_kv)


def test_longest_sequences() -> None:
    """Nothing overflows: from both sides, at both ends and in the middle of the longest sequences that a problem may have."""
    longest, tile = (1 << 30) - 1, 128
    for mask, (q_len, kv_len) in itertools.product(masks([None, 0, 5]), [(longest, longest), (longest, 300), (300, longest)]):
        asked = OnHost(mask, MASK + TILES, (q_len, kv_len), (tile, tile))
        q_last, kv_last = (q_len - 1) // tile, (kv_len - 1) // tile
        places = {*itertools.product({0, 1, q_last // 2, q_last - 1, q_last}, {0, 1, kv_last // 2, kv_last - 1, kv_last})}
        for t, n in places:
            begin, _, _, end = asked.tiles("kv_tiles", t * tile, min((t + 1) * tile, q_len))
            q_begin, _, _, q_end = asked.tiles("q_tiles", n * tile, min((n + 1) * tile, kv_len))
            assert (begin <= n < end) == (q_begin <= t < q_end), (mask, q_len, kv_len, t, n)


SCHEDULES = """\
namespace cfg { extern "C" { i32 tile_q, tile_kv; } }
inline i32 __popc(u32 x) { return __builtin_popcount(x); }
struct Args {
    i32 heads, heads_per_kv, batches, kv_tiles, l2_head_group, last_group, total_q, total_kv;
    const i32 *cu_seqlens_q, *cu_seqlens_kv;
    i32* counter;
    u32* violations;
    i32 bundle_works;
};
#include "variant/rows/varlen.cuh"
using Rows = Varlen;
#include "variant/scheduler/alternating.cuh"
#include "variant/scheduler/alternating_long.cuh"
#include "variant/scheduler/ascending.cuh"
#include "variant/scheduler/dynamic_persistent.cuh"
#include "variant/scheduler/kv_bundles.cuh"
#include "variant/scheduler/kv_lpt.cuh"
#include "variant/scheduler/kv_lpt_varlen.cuh"
#include "variant/scheduler/kv_windows.cuh"
#include "variant/scheduler/longest_first.cuh"
#include "variant/scheduler/shortest_first.cuh"

// The works that one block's producer warp finds, until it finds no more.
template <class Scheduler>
i32 run(const Args& args, KvWorkTile* found, i32 most, i32 grid = 1) {
    i32 count = 0;  // lane 0 writes it
    gridDim.x = grid;
    run_warp([=, &args, &count](i32 lane) {
        Scheduler scheduler(args);
        for (i32 mine = 0; mine < most; ++mine) {
            const KvWorkTile work = scheduler.next();
            if (work.is_last()) break;
            if (lane == 0) found[count++] = work;
        }
        scheduler.finish();
    });
    return count;
}

// All numbers, in the order in which the blocks of a grid take them.
struct AllNumbers {
    i32 id = 0;
    i32 draw(const Args&) { return id++; }
    static void finish(const Args&) {}
};
extern "C" i32 packed_of_grid(const Args* args, KvWorkTile* found, i32 most, i32 grid) {
    return run<KvVarlenScheduler<AllNumbers, AlternatingLong>>(*args, found, most, grid);
}
extern "C" i32 packed_bundles(const Args* args, KvWorkTile* found, i32 most) {
    return run<KvBundles<DynamicPersistent>>(*args, found, most);
}
extern "C" i32 packed_windows(const Args* args, KvWorkTile* found, i32 most) {
    return run<KvWindows<DynamicPersistent>>(*args, found, most);
}
extern "C" i32 windows_of_grid(const Args* args, KvWorkTile* found, i32 most, i32 grid) {
    return run<KvWindows<AllNumbers>>(*args, found, most, grid);
}
extern "C" i32 bundles_of_grid(const Args* args, KvWorkTile* found, i32 most, i32 grid) {
    return run<KvBundles<AllNumbers>>(*args, found, most, grid);
}
"""
SCHEDULE = """\
extern "C" i32 dense_{0}(const Args* args, KvWorkTile* found, i32 most) {{
    return run<KvScheduler<DynamicPersistent, {0}>>(*args, found, most);
}}
extern "C" i32 packed_{0}(const Args* args, KvWorkTile* found, i32 most) {{
    return run<KvVarlenScheduler<DynamicPersistent, {0}>>(*args, found, most);
}}
"""
DIRECTIONS = ("Ascending", "Alternating", "AlternatingLong", "ShortestFirst", "LongestFirst")


class Args(ctypes.Structure):
    _fields_ = [
        *((x, ctypes.c_int) for x in ("heads", "heads_per_kv", "batches", "kv_tiles", "l2_head_group", "last_group", "q", "kv")),
        *((x, ctypes.c_void_p) for x in ("cu_seqlens_q", "cu_seqlens_kv", "counter", "violations")),
        ("bundle_works", ctypes.c_int),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = SCHEDULES + "".join(SCHEDULE.format(name) for name in DIRECTIONS)
    return native.library(text, tmp_path_factory.mktemp("kv_schedules"))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, lengths", [
    *(("dense", (n,) * batch) for n in (1, 64, 700) for batch in (1, 3)),
    *(("packed", lengths) for lengths in ((), (0,), (0, 0, 129, 0), tuple(range(0, 130, 7)), (0,) * 70 + (5,) + (0,) * 70)),
    pytest.param("packed", tuple(range(0, 400, 7)), marks=pytest.mark.slow),
])  # fmt: skip
def test_key_tiles_are_taken_in_the_order_of_their_turns(
    schedules: ctypes.CDLL, direction: str, kind: str, lengths: tuple[int, ...]
) -> None:
    """Each once, and a block waits only for tiles that were taken before its own."""
    tile = 64
    ctypes.c_int.in_dll(schedules, "tile_kv").value = tile
    counter, starts, said = np.zeros(2, np.int32), np.cumsum([0, *lengths], dtype=np.int32), np.zeros(1, np.uint32)
    for heads, group in ((2, 1), (12, 2), (12, 5), (12, 100)):
        kv_heads = heads // 2
        wanted = [(b, h, n) for b, length in enumerate(lengths) for h in range(kv_heads) for n in range(-(-length // tile))]
        group = min(group, max(1, kv_heads * len(lengths)))
        args = Args(
            heads, 2, len(lengths), -(-max(lengths, default=0) // tile), group, max(0, kv_heads * len(lengths) // group - 1),
            sum(lengths), sum(lengths), starts.ctypes.data, starts.ctypes.data, counter.ctypes.data, said.ctypes.data,
        )  # fmt: skip
        found = np.zeros((len(wanted) + 1, 5), np.int32)
        call = getattr(schedules, f"{kind}_{direction}")
        count = call(ctypes.byref(args), ctypes.c_void_p(found.ctypes.data), len(found))
        works = found[:count].tolist()
        assert sorted(tuple(work[:3]) for work in works) == wanted
        assert not counter.any() and not said[0], "the counter is not ready for the next launch"
        ends_short = direction == "ShortestFirst" or (kind == "packed" and lengths[-1:] in ((), (0,)))
        assert ends_short or works[-1][3], "the last works of all are long"
        before: dict[tuple[int, int], int] = {}
        if direction == "ShortestFirst":  # as lists have it: their turns go down, whatever a work says of itself
            assert all((kv_ascends, q_ascends) == (0, 1) for *_, kv_ascends, q_ascends in works)
        if direction == "LongestFirst":
            assert all((kv_ascends, q_ascends) == (1, 0) for *_, kv_ascends, q_ascends in works)
        for b, h, n, kv_ascends, _ in works:
            assert n == before.get((b, h), -1) + 1 if kv_ascends else n == before.get((b, h), -(-lengths[b] // tile)) - 1
            before[b, h] = n


def test_short_sequences_descend_together(schedules: ctypes.CDLL) -> None:
    """Sequences with fewer key tiles of all heads than blocks descend, but for the last one. Longer ones alternate."""
    ctypes.c_int.in_dll(schedules, "tile_kv").value = 64
    lengths, said = (128, 64, 1000, 320, 0, 128, 256, 192), np.zeros(1, np.uint32)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    args = Args(4, 2, len(lengths), 0, 1, 0, *[sum(lengths)] * 2, *[starts.ctypes.data] * 2, None, said.ctypes.data)
    found = np.zeros((100, 5), np.int32)
    count = schedules.packed_of_grid(ctypes.byref(args), ctypes.c_void_p(found.ctypes.data), len(found), 8)
    ways, taken = dict[tuple[int, int], tuple[int, int]](), dict[tuple[int, int], list[int]]()
    for b, h, n, *way in found[:count].tolist():
        assert ways.setdefault((b, h), (way[0], way[1])) == (way[0], way[1]), "all works of a head go one way"
        taken.setdefault((b, h), []).append(n)
    down, up = (0, 1), (1, 0)
    wanted = {0: [down, down], 1: [down, down], 2: [up, down], 3: [up, up], 5: [down, down], 6: [down, down], 7: [up, up]}
    assert ways == {(b, h): way for b, pair in wanted.items() for h, way in enumerate(pair)}
    for (b, h), (kv_ascends, _) in ways.items():
        tiles = [*range(-(-lengths[b] // 64))]
        assert taken[b, h] == (tiles if kv_ascends else tiles[::-1]), "they are taken in the order of their turns"
    assert not said[0]


@pytest.mark.parametrize("enough", [1, 7, 30, 10**6])
def test_sequences_side_by_side(schedules: ctypes.CDLL, enough: int) -> None:
    """Of a bundle all first key tiles come first. A sequence with enough works is alone, in groups of heads."""
    tile, heads, grid = 64, 3, 8
    ctypes.c_int.in_dll(schedules, "tile_kv").value = tile
    lengths, said = np.random.default_rng(4).choice([0, 1, 64, 130, 700], 90).tolist(), np.zeros(1, np.uint32)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    args = Args(
        2 * heads, 2, len(lengths), 0, 1, 0, *[sum(lengths)] * 2, *[starts.ctypes.data] * 2, None, said.ctypes.data, enough
    )
    tiles, wanted, begin = [-(-length // tile) for length in lengths], list[tuple[int, int, int]](), 0
    while begin < len(lengths):
        count = next((n for n in range(1, 33) if heads * sum(tiles[begin : begin + n]) >= enough), 32)
        alone = (n for n in range(1, count) if heads * sum(tiles[begin + n : begin + n + 1]) >= enough)
        bundle = [*range(begin, min(begin + next(alone, count), len(lengths)))]
        group = min(heads, (grid - 1) // max(1, tiles[begin]) + 1) if len(bundle) == 1 else heads
        firsts = [*range(0, heads // group * group, group)]
        for first, last in zip(firsts, [*firsts[1:], heads], strict=True):
            for n in range(max(tiles[b] for b in bundle)):
                wanted += [(b, h, n) for b in bundle if n < tiles[b] for h in range(first, last)]
        begin = bundle[-1] + 1
    found = np.zeros((len(wanted) + 1, 5), np.int32)
    count = schedules.bundles_of_grid(ctypes.byref(args), ctypes.c_void_p(found.ctypes.data), len(found), grid)
    assert [tuple(work) for work in found[:count].tolist()] == [(*work, 1, 1) for work in wanted]
    assert not said[0]


@pytest.mark.parametrize("name", ["packed_Ascending", "packed_bundles", "packed_windows"])
@pytest.mark.parametrize("side", ["cu_seqlens_q", "cu_seqlens_kv"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_key_tiles_of_what_lies_in_no_order_are_left_out(schedules: ctypes.CDLL, wrong: list[int], side: str, name: str) -> None:
    ctypes.c_int.in_dll(schedules, "tile_kv").value, ctypes.c_int.in_dll(schedules, "tile_q").value = 64, 64
    counter, said, starts = np.zeros(2, np.int32), np.zeros(1, np.uint32), np.array(wrong, np.int32)
    good = np.maximum.accumulate(np.clip(starts, 0, ROWS))
    args = Args(1, 1, len(wrong) - 1, 0, 1, 0, ROWS, ROWS, *[good.ctypes.data] * 2, counter.ctypes.data, said.ctypes.data, 5)
    setattr(args, side, starts.ctypes.data)
    found = np.zeros((200, 5), np.int32)
    count = getattr(schedules, name)(ctypes.byref(args), ctypes.c_void_p(found.ctypes.data), len(found))
    works, lengths = [tuple(work[:3]) for work in found[:count].tolist()], np.diff(good)[: len(right(wrong))].tolist()
    assert sorted(works) == [(b, 0, n) for b, length in enumerate(lengths) for n in range(-(-length // 64))]
    assert said[0] == 128 and not counter.any()


TURNS = """\
#include <cstdlib>
namespace cfg { constexpr i32 tile_q = 1, tile_kv = 1; }
inline i32 __popc(u32 x) { return __builtin_popcount(x); }
struct Rows { i32 q_len, kv_len; };
namespace function { struct Ints { i32 lo, hi; }; }
template <class, class> struct ListMaskOption {};

// Which pairs are kept, as sums over all before a query and a key.
struct Mask {
    const Rows rows;
    const i32* sums;

    i32 upto(i32 q, i32 kv) const { return sums[q * (rows.kv_len + 1) + kv]; }
    i32 classify(function::Ints q, function::Ints, function::Ints kv) const {
        const i32 all = (q.hi + 1 - q.lo) * (kv.hi + 1 - kv.lo);
        const i32 kept = upto(q.hi + 1, kv.hi + 1) - upto(q.lo, kv.hi + 1) - upto(q.hi + 1, kv.lo) + upto(q.lo, kv.lo);
        return kept == all ? 2 : kept > 0;
    }
};
#include "variant/work_tile.cuh"
#include "variant/walk/turn_list.cuh"

template <class Run>
void by_warp(i32 q_len, i32 kv_len, const i32* sums, Run run) {
    run_warp([=](i32 lane) { run(Mask{{q_len, kv_len}, sums}, lane); });
}
// What the counters of tiles of dq begin with, and what each key tile that adds sets them to.
extern "C" void turns(i32 q_len, i32 kv_len, const i32* sums, i32* first, i32* after) {
    by_warp(q_len, kv_len, sums, [=](const Mask& mask, i32 lane) {
        for (i32 q = 0; q < q_len; ++q) first[q] = ListTurn::first(mask, mask.rows, {0, 0, q, 0});
        for (i32 kv = 0; kv < kv_len; ++kv)
            for (i32 begin = 0; begin < q_len; begin += 32) {
                const Boxes boxes{mask, mask.rows, 0};
                if (!boxes.classify(begin, 32, kv, 1)) continue;
                const i32 q = begin + lane;
                const bool asks = boxes.classify(q, 1, kv, 1) != 0;
                const i32 found = ListTurn::find_next(boxes, asks, q, kv);
                if (asks) after[q * kv_len + kv] = found;
            }
    });
}
// The query tiles of a key tile, each group of 32 by a scan that goes on behind the last one.
extern "C" void queries(i32 q_len, i32 kv_len, const i32* sums, i32 kv, i32* found) {
    by_warp(q_len, kv_len, sums, [=](const Mask& mask, i32 lane) {
        i32* to = found;
        for (i32 group = -1;;) {
            Scan<QueryTiles> scan({mask, mask.rows, 0, kv});
            if (group >= 0) scan.resume(group);
            if (!scan.next_group([&](i32 tile) { return u32(scan.line.classify(tile)); })) return;
            if (scan.mine) to[__popc(scan.tiles & ((1u << lane) - 1))] = scan.tile(lane);
            to += __popc(scan.tiles), group = scan.group;
        }
    });
}
"""


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("turns")
    for name in ("variant/interfaces.cuh", "function/range.cuh"):  # the text has what is needed of them
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("#pragma once\n")
    return native.library(TURNS, folder)


@pytest.mark.parametrize(
    "q_len, kv_len, density", [(1, 1, 1.0), (3, 5, 0.0), (40, 33, 0.5), (70, 70, 0.05), (5, 2100, 0.003), (2100, 2, 0.01)]
)
def test_key_tiles_of_lists_add_from_the_last_one_on(turns: ctypes.CDLL, q_len: int, kv_len: int, density: float) -> None:
    """Each that does says which one is the next, across groups of 32 tiles and of 1024. So the order is that of their works, and
    each has its turn. Query tiles ascend."""
    kept = np.random.default_rng(1).random((q_len, kv_len)) < density
    sums = np.zeros((q_len + 1, kv_len + 1), np.int32)
    sums[1:, 1:] = kept.cumsum(0).cumsum(1)
    first, after = np.zeros(q_len, np.int32), np.full(kept.shape, -2, np.int32)
    turns.turns(q_len, kv_len, *(ctypes.c_void_p(x.ctypes.data) for x in (sums, first, after)))
    for q in range(q_len):
        tiles = np.flatnonzero(kept[q])[::-1].tolist()
        assert first[q] == (~tiles[0] if tiles else 0)
        assert after[q, tiles].tolist() == [*tiles[1:], -1][: len(tiles)]
    for kv in {0, kv_len // 2, kv_len - 1}:
        wanted = np.flatnonzero(kept[:, kv])
        found = np.full(len(wanted) + 1, -1, np.int32)
        turns.queries(q_len, kv_len, ctypes.c_void_p(sums.ctypes.data), kv, ctypes.c_void_p(found.ctypes.data))
        assert found.tolist() == [*wanted, -1]


ROUNDS = """\
namespace cfg { constexpr i32 tile_q = 2, tile_kv = 3, causal_to_last = 1; }
struct Args { i32 heads, heads_per_kv, window_tiles, q_stride, group_parts, part_tiles, grid; };
struct Rows {
    i32 q_len, kv_len;
    i32 shift(bool) const { return kv_len - q_len; }
};
template <class> struct QTilesOption {};
template <class> struct KvTilesOption {};
#include "variant/mask/FILE.cuh"
using Mask = NAME;
#include "variant/walk/q_interval_rotated.cuh"
#include "variant/walk/q_interval_part.cuh"
#include "variant/walk/q_interval_rotated_packed.cuh"

// The steps of a key tile: query tiles, the numbers of its turns there, and the last ones.
extern "C" i32 steps(const Args* args, i32 q_len, i32 kv_len, i32 kv_tile, i32 part, i32 (*found)[3]) {
    const Rows rows{q_len, kv_len};
    const KvWorkTile work{0, part, kv_tile, 1, 1};
    gridDim.x = args->grid;
    i32 count = 0;
    for (WALK at(*args, rows, work); at.more(); at.advance()) {
        const IntervalTurn turn = at.turn(Mask(*args, rows, at.work_tile()));
        found[count][0] = at.tile, found[count][1] = turn.number, found[count++][2] = turn.last;
    }
    return count;
}
"""


def going_round(name: str, walk: str, folder: pathlib.Path) -> ctypes.CDLL:
    for header in ("variant/interfaces.cuh", "variant/interfaces_bwd.cuh"):
        (folder / header).parent.mkdir(parents=True, exist_ok=True)
        (folder / header).write_text('#pragma once\n#include "variant/kv_work_tile.cuh"\n#include "variant/work_tile.cuh"\n')
    return native.library(ROUNDS.replace("FILE", name.lower()).replace("NAME", name).replace("WALK", walk), folder)


@pytest.mark.parametrize("name", ["Full", "Causal"])
def test_packed_sequences_go_round(schedules: ctypes.CDLL, name: str, tmp_path: pathlib.Path) -> None:
    """Each work is there once, turns are counted without a gap, and blocks with a work of each so many come to an end."""
    library, random, said = (
        going_round(name, "QIntervalRotatedPacked", tmp_path),
        np.random.default_rng(5),
        np.zeros(1, np.uint32),
    )
    ctypes.c_int.in_dll(schedules, "tile_kv").value, ctypes.c_int.in_dll(schedules, "tile_q").value = 3, 2
    for heads, grid in itertools.product((1, 2, 5), (1, 4, 7, 40)):
        lengths = random.choice([0, 1, 4, 9, 20, 50], (7, 2))
        starts = np.concatenate([np.zeros((1, 2)), lengths.cumsum(0)]).astype(np.int32).T.copy()
        args = Args(
            2 * heads, 2, 7, 0, 1, 0, *lengths.sum(0).tolist(), *[each.ctypes.data for each in starts], None, said.ctypes.data
        )
        found = np.zeros((heads * 150, 5), np.int32)
        count = schedules.windows_of_grid(ctypes.byref(args), ctypes.c_void_p(found.ctypes.data), len(found), grid)
        order = [tuple(work[:3]) for work in found[:count].tolist()]
        assert sorted(order) == [(b, h, n) for b in range(7) for h in range(heads) for n in range(-(-lengths[b][1] // 3))]
        works, counts = list[list[tuple[tuple[int, int, int], int]]](), dict[tuple[int, int, int], int]()
        for b, h, n in order:
            steps, (q_len, kv_len) = np.zeros((60, 3), np.int32), lengths[b].tolist()
            of_round = (ctypes.c_int * 7)(1, 1, 0, 0, 1, 0, grid)
            taken = library.steps(of_round, q_len, kv_len, n, 0, ctypes.c_void_p(steps.ctypes.data))
            works.append([((b, h, tile), number) for tile, number, _ in steps[:taken].tolist()])
        blocks = [[step for work in works[block::grid] for step in work] for block in range(grid)]
        while any(blocks):
            ready = [steps for steps in blocks if steps and counts.get(steps[0][0], 0) == steps[0][1]]
            assert ready, "each waits for another"
            for steps in ready:
                place, number = steps.pop(0)
                counts[place] = number + 1
    assert not said[0]


@pytest.mark.parametrize("walk", ["QIntervalRotated", "QIntervalPart"])
@pytest.mark.parametrize("name", ["Full", "Causal"])
def test_key_tiles_that_go_round_wait_for_none_of_a_later_window(name: str, walk: str, tmp_path: pathlib.Path) -> None:
    """At each query tile turns are counted without a gap, and works of a window come to an end where only they run. A tile is of
    one part."""
    library = going_round(name, walk, tmp_path)
    random = np.random.default_rng(3)
    for q_len, kv_len, window, stride, parts in random.integers((1, 1, 1, 60, 1), (60, 90, 12, 1100, 5), (300, 5)).tolist():
        parts = parts if walk == "QIntervalPart" else 1
        args, turns = (ctypes.c_int * 7)(1, 1, window, stride, parts, -(-q_len // (2 * parts))), dict[int, list[int]]()
        counts, works = dict[int, int](), list[list[list[int]]]()
        for kv_tile, part in itertools.product(range(-(-kv_len // 3)), range(parts)):
            found = np.zeros((q_len, 3), np.int32)
            count = library.steps(args, q_len, kv_len, kv_tile, part, ctypes.c_void_p(found.ctypes.data))
            works.append(found[:count].tolist())
            for tile, number, _ in works[-1]:
                turns.setdefault(tile, []).append(number)
        assert all(sorted(numbers) == [*range(len(numbers))] for numbers in turns.values())
        assert all(last == len(turns[tile]) - 1 for steps in works for tile, _, last in steps)
        for begin in range(0, len(works), window * parts):
            running = works[begin : begin + window * parts]
            while any(running):
                ready = [steps for steps in running if steps and counts.get(steps[0][0], 0) == steps[0][1]]
                assert ready, "each waits for another"
                for steps in ready:
                    tile, number, _ = steps.pop(0)
                    counts[tile] = number + 1
