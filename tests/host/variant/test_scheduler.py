"""The schedules, compiled for the host: whatever the blocks' order, each query tile of each head is drawn exactly once."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd, render
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.operation import Forward
from rawattn.variant import rows, scheduler
from rawattn.variant.element import BF16
from rawattn.variant.field import Field
from tests import native
from tests.operations import forward

DEVICE = TYPICAL["sm_90a"]
TILE_Q = 128
FIELDS = (Field("heads", "i32"), *rows.Varlen().fields, *scheduler.LptScheduler(split=True).fields)
TEXT = """\
#include <memory>
#include <vector>
namespace cfg { extern "C" { i32 tile_q, tile_kv; } }
struct Args { FIELDS };
#include "variant/rows/varlen.cuh"
using Rows = Varlen;
#include "variant/scheduler/dynamic_persistent.cuh"
#include "variant/scheduler/split.cuh"
#include "variant/scheduler/lpt.cuh"
#include "variant/scheduler/lpt_varlen.cuh"
#include "variant/scheduler/two_ended.cuh"

// The works that the producer warps of all blocks find, taking turns in this order, each until it finds no more.
template <class Scheduler>
i32 run(const Args& args, i32 blocks, const i32* order, i32 turns, WorkTile* found, i32 most) {
    i32 count = 0;  // lane 0 writes it
    gridDim.x = blocks;
    run_warp([=, &args, &count](i32 lane) {
        std::vector<std::unique_ptr<Scheduler>> schedules;
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) schedules.push_back(std::make_unique<Scheduler>(args));
        i32 mine = 0;
        for (i32 turn = 0, active = blocks; active && mine < most; ++turn) {
            blockIdx.x = order[turn % turns];
            auto& scheduler = schedules[blockIdx.x];
            if (!scheduler) continue;
            const WorkTile work = scheduler->next();
            if (work.is_last()) scheduler->finish(), scheduler.reset(), --active;
            else if (++mine, lane == 0) found[count++] = work;
        }
    });
    return count;
}
extern "C" i32 dense(const Args* args, i32 blocks, const i32* order, i32 turns, WorkTile* found, i32 most) {
    return run<LptScheduler<DynamicPersistent>>(*args, blocks, order, turns, found, most);
}
extern "C" i32 dense_split(const Args* args, i32 blocks, const i32* order, i32 turns, WorkTile* found, i32 most) {
    return run<LptScheduler<Split<DynamicPersistent>>>(*args, blocks, order, turns, found, most);
}
extern "C" i32 packed_split(const Args* args, i32 blocks, const i32* order, i32 turns, WorkTile* found, i32 most) {
    return run<LptVarlenScheduler<Split<DynamicPersistent>>>(*args, blocks, order, turns, found, most);
}
extern "C" i32 packed(const Args* args, i32 blocks, const i32* order, i32 turns, WorkTile* found, i32 most) {
    return run<LptVarlenScheduler<DynamicPersistent>>(*args, blocks, order, turns, found, most);
}
extern "C" i32 both_ends(const Args* args, i32 blocks, const i32* order, i32 turns, WorkTile* found, i32 most) {
    return run<TwoEndedScheduler>(*args, blocks, order, turns, found, most);
}
""".replace("FIELDS", " ".join(f"{ctype} {name};" for name, ctype, _ in FIELDS))
Works = list[tuple[int, ...]]  # (batch, head, first query, split)
ROWS = 1000
WRONG = {  # cu_seqlens of so many rows
    "beyond": [0, 300, 2 * ROWS, 2 * ROWS],
    "below": [-1, 300, 500, ROWS],
    "falling": [0, 500, 300, ROWS],
    "wild": [0, 300, 2**31 - 1, -(2**31), 500],
    "difference overflows": [0, 3, -(2**31), 2**31 - 1],
    "late": [*range(0, 700, 10), ROWS + 1, 701, 702],
    "again": [0, ROWS, 0, ROWS],
}


def right(starts: Sequence[int]) -> list[int]:
    """The lengths of the sequences in front of the first that does not lie where it should."""
    found = (end - begin if 0 <= begin <= end <= ROWS else -1 for begin, end in itertools.pairwise(starts))
    return [*itertools.takewhile(lambda length: length >= 0, found)]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return native.library(TEXT, tmp_path_factory.mktemp("schedule"))


def drawn(
    cuda: ctypes.CDLL, op: Forward, lengths: Sequence[int], blocks: int, most: int, splits: int, name: str | None = None,
    order: Sequence[int] = (), wrong: Sequence[int] | None = None,
) -> Works:  # fmt: skip
    """Returns what the blocks draw, in order, by the schedule of this name or the operation's own; they take turns in this order,
    over and over, or in a random one. ``wrong`` stands in the place of cu_seqlens that say these lengths."""
    ctypes.c_int.in_dll(cuda, "tile_q").value = TILE_Q
    counter, starts = np.zeros(4, np.int32), np.cumsum([0, *lengths], dtype=np.int32)
    values = {**ATTN_FWD.values(op, attn_fwd.AttnFwdConfig(TILE_Q), DEVICE), "counter": counter.ctypes.data, "splits": splits}
    starts, said = starts if wrong is None else np.array(wrong, np.int32), np.zeros(1, np.uint32)
    values |= {"cu_seqlens_q": starts.ctypes.data, "cu_seqlens_kv": starts.ctypes.data, "violations": said.ctypes.data}
    layout = render.layout(FIELDS)
    args = np.frombuffer(layout.pack.pack(*(values.get(field.name, 0) for field in FIELDS)), np.uint8)
    each = np.array(order or np.random.default_rng(0).permuted(np.arange(8 * blocks) % blocks), np.int32)
    found = np.zeros((most, 4), np.int32)
    given, turns, to = (ctypes.c_void_p(x.ctypes.data) for x in (args, each, found))
    run = getattr(cuda, name or f"{'packed' if op.varlen else 'dense'}{'_split' if splits else ''}")
    count = run(given, blocks, turns, len(each), to, most)
    assert not counter.any(), "the counter is not ready for the next launch"
    assert said[0] == (0 if wrong is None else 128)
    return [tuple(work) for work in found[:count].tolist()]


def check(cuda: ctypes.CDLL, op: Forward, lengths: Sequence[int], name: str | None = None) -> None:
    tiles = [(batch, head, q) for batch, n in enumerate(lengths) for head in range(op.heads) for q in range(0, n, TILE_Q)]
    for blocks, splits in ((1, 0), (13, 0), *([] if name else [(13, 3)])):
        wanted = [(*tile, split) for tile in tiles for split in range(max(1, splits))]
        works = drawn(cuda, op, lengths, blocks, len(wanted) + 1, splits, name)
        assert sorted(works) == wanted
    last = {}
    for batch, head, q, _ in drawn(cuda, op, lengths, 1, len(tiles) + 1, 0, name):
        assert q < last.get((batch, head), 1 << 30), "a tile that sees fewer keys comes before one that sees more"
        last[batch, head] = q


@pytest.mark.parametrize("kv_len", [1, 1 << 14, 1 << 20])
@pytest.mark.parametrize("heads", [1, 3, pytest.param(40, marks=pytest.mark.slow)])
def test_equal_lengths(cuda: ctypes.CDLL, heads: int, kv_len: int) -> None:
    for batch, q_len in itertools.product((1, 7), (1, 128, 700)):
        check(cuda, forward(BF16, batch, q_len, kv_len, heads, 1, 128, 128), [q_len] * batch)


LENGTHS = {
    "none": (),
    "an empty one": (0,),
    "one": (1,),
    "empty ones between": (0, 0, 129, 0),
    "equal": (300,) * 5,
    "growing": tuple(range(0, 400, 7)),
    "one among many empty": (0,) * 70 + (5,) + (0,) * 70,
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("heads", [1, 3])
def test_packed_sequences(cuda: ctypes.CDLL, heads: int, lengths: tuple[int, ...]) -> None:
    longest, total = max(lengths, default=0), sum(lengths)
    op = forward(BF16, len(lengths), longest, longest, heads, 1, 64, 64, varlen=True, total_q=total, total_kv=total)
    check(cuda, op, lengths)
    check(cuda, op, lengths, "both_ends")


@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_lies_in_no_order_is_left_out(cuda: ctypes.CDLL, wrong: list[int], splits: int) -> None:
    op = forward(BF16, len(wrong) - 1, 1000, 1000, 2, 1, 64, 64, varlen=True, total_q=ROWS, total_kv=ROWS)
    lengths = right(wrong)
    wanted = [(b, h, q) for b, n in enumerate(lengths) for h in range(2) for q in range(0, n, TILE_Q)]
    works = drawn(cuda, op, (), 5, 100 + 3 * len(wanted), splits, wrong=wrong)
    assert sorted(works) == [(*tile, split) for tile in wanted for split in range(max(1, splits))]


@pytest.mark.parametrize("lengths", [(1, 1, 1, 300), (300, 1, 1, 1)], ids=["before", "behind"])
def test_half_of_the_blocks_decode_beside_a_prompt(cuda: ctypes.CDLL, lengths: tuple[int, ...]) -> None:
    op = forward(BF16, 4, 300, 300, 2, 1, 64, 64, varlen=True, total_q=303, total_kv=303)
    found = drawn(cuda, op, lengths, 2, 13, 0, "both_ends", order=(0, 1))
    prompt = lengths.index(300)
    assert [work[0] == prompt for work in found] == [prompt == 0, prompt != 0] * 6
    assert [work[1] for work in found] == [0, 0, 1, 1] * 3, "all heads of a tile together"
    assert [work[2] for work in found if work[0] == prompt] == [256, 256, 128, 128, 0, 0]


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 0, 0), (0, 1, 1, 1, 1), (0, 1, 2, 3, 2, 2, 0)], ids=str)
@pytest.mark.parametrize("lengths", [(1, 900), (900, 1), (900,), (300, 700, 1)], ids=str)
def test_both_ends_meet_in_a_sequence(cuda: ctypes.CDLL, lengths: tuple[int, ...], order: tuple[int, ...]) -> None:
    """Its longest tile that is left comes next, whichever half takes it."""
    longest, total = max(lengths), sum(lengths)
    op = forward(BF16, len(lengths), longest, longest, 3, 1, 64, 64, varlen=True, total_q=total, total_kv=total)
    blocks, tiles = 1 + max(order), sum(-(-n // TILE_Q) for n in lengths)
    found = drawn(cuda, op, lengths, blocks, 3 * tiles + 1, 0, "both_ends", order)
    assert len(set(found)) == len(found) == 3 * tiles
    for sequence in range(len(lengths)):
        starts = [(q, -head) for batch, head, q, _ in found if batch == sequence]
        assert starts == sorted(starts, reverse=True)
