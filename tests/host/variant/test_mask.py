"""The mask files, compiled for the host, against what the masks in Python say of every single (query, key) pair."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import ClassVar

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rawattn.testing.option_checks import MASK, TILES, Offsets, OnHost, check_boxes, check_mask
from rawattn.variant.field import Field, Fields
from rawattn.variant.mask import ALIGNMENTS, And, Causal, Full, Mask, SplitTilesMask, Window
from tests import native, options


@pytest.fixture(autouse=True)
def compiler() -> None:
    native.needs_compiler()


def masks(sides: list[int | None]) -> list[Mask]:
    """Every kind of mask, with all these window sides."""
    found: list[Mask] = [Full()]
    for align in ALIGNMENTS:
        windows = [Window(left, right, align) for left in sides for right in sides]
        causal = [Causal(other) for other in ALIGNMENTS]
        found += [Causal(align), *windows, *itertools.starmap(And, itertools.product(causal, windows))]
        found += [And(window, Causal(align)) for window in windows]
    return found


def test_every_small_case() -> None:
    for mask in masks([None, 0, 1, 4]):
        for q_len, kv_len, tile_kv in itertools.product(range(8), range(8), (2, 3)):
            check_mask(mask, q_len, kv_len, 4, 2, tile_kv)


def offsets(largest: int) -> st.SearchStrategy[Offsets]:
    return st.none() | st.tuples(st.integers(0, largest), st.integers(0, largest))


LENGTHS = st.integers(0, 600) | st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
SIDES = st.none() | st.integers(0, 700) | st.sampled_from([0, 1, 2, 31, 37, 61, 63, 64, 65, 97, 127, 128, 131, 251, 257])
ALIGN = st.sampled_from(ALIGNMENTS)
WINDOW, CAUSAL = st.builds(Window, SIDES, SIDES, ALIGN), st.builds(Causal, ALIGN)
SAME = ALIGN.flatmap(lambda align: st.builds(And, st.builds(Window, SIDES, SIDES, st.just(align)), st.just(Causal(align))))
KINDS = {
    "full": st.just(Full()),
    "causal": CAUSAL,
    "window": WINDOW,
    "both": SAME,
    "both, two alignments": st.builds(And, CAUSAL, WINDOW),
    **options.MASKS,
    "dilated": st.builds(options.Dilated, st.integers(1, 131)),
}


SMALL = st.integers(0, 60)
SMALL_WINDOW = st.builds(Window, st.none() | SMALL, st.none() | SMALL, ALIGN)
SMALL_KINDS = KINDS | {
    "window": SMALL_WINDOW,
    "both": st.builds(lambda window: And(Causal(window.align), window), SMALL_WINDOW),
    "both, two alignments": st.builds(And, CAUSAL, SMALL_WINDOW),
}


@pytest.mark.parametrize("kind", KINDS)
def test_real_sizes(kind: str) -> None:
    """Each kind of mask has examples of its own, with window sides that divide no tile."""

    @hypothesis.settings(max_examples=150, derandomize=True, database=None, deadline=None)
    @hypothesis.given(
        KINDS[kind], LENGTHS, LENGTHS, st.sampled_from([64, 128, 192]), st.integers(2, 16).map(lambda n: 16 * n),
        offsets(700), st.integers(0, 5),
    )  # fmt: skip
    def test(mask: Mask, q_len: int, kv_len: int, tile_q: int, tile_kv: int, offsets: Offsets, head: int) -> None:
        if mask.lists:
            check_boxes(mask, q_len, kv_len, tile_q, tile_kv, head)
        else:
            check_mask(mask, q_len, kv_len, tile_q, 64, tile_kv, offsets, head)

    test()


@pytest.mark.parametrize("kind", KINDS)
def test_small_tiles(kind: str) -> None:
    """The same with tiles so small that every bound falls on their borders in some example."""

    @hypothesis.settings(max_examples=300, derandomize=True, database=None, deadline=None)
    @hypothesis.given(
        SMALL_KINDS[kind], SMALL, SMALL, st.sampled_from([(2, 1), (4, 2), (6, 3), (14, 7)]), st.sampled_from([1, 2, 3, 5, 7, 11]),
        offsets(60), st.integers(0, 5),
    )  # fmt: skip
    def test(mask: Mask, q_len: int, kv_len: int, tile: tuple[int, int], tile_kv: int, offsets: Offsets, head: int) -> None:
        if mask.lists:
            check_boxes(mask, q_len, kv_len, tile[0], tile_kv, head)
        else:
            check_mask(mask, q_len, kv_len, *tile, tile_kv, offsets, head)

    test()


def test_longest_sequences() -> None:
    """Nothing overflows: the tiles of single queries of the longest sequences that an operation may have."""
    longest = (1 << 30) - 1
    for mask, (q_len, kv_len) in itertools.product(masks([None, 0, 5]), [(longest, longest), (longest, 7), (7, longest)]):
        asked = OnHost(mask, MASK + TILES, (q_len, kv_len), (64, 128))
        for q in (0, q_len - 7, q_len - 1):
            begin, end = (int(bound[0]) for bound in mask.interval(np.array([q]), q_len, kv_len))
            first, _, _, last = asked.tiles("kv_tiles", q, q + 1)
            if begin < end:
                assert (first, last) == (begin // 128, -(-end // 128)), (mask, q_len, kv_len, q)
            else:
                assert first >= last or len(set(mask.constants.values())) == 2, (mask, q_len, kv_len, q)
        for key in (0, kv_len - 7, kv_len - 1):
            q = np.unique(np.clip(key + np.array([-q_len, -kv_len, 0, q_len - kv_len]), 0, q_len - 1))
            begin, end = mask.interval(q, q_len, kv_len)
            first, _, _, last = asked.tiles("q_tiles", key, key + 1)
            tile = q[(begin <= key) & (key < end)] // 64
            assert ((first <= tile) & (tile < last)).all(), (mask, q_len, kv_len, key)


@dataclasses.dataclass(frozen=True)
class Parts(SplitTilesMask):
    """The mask for so many splits, which a kernel has from its scheduler."""

    splits: int
    split_tiles: int
    type: ClassVar[str] = "SplitTilesMask"

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("splits", "i32"), Field("split_tiles", "i32"))

    @property
    def values(self) -> dict[str, float]:
        return {**self.base.values, "splits": self.splits, "split_tiles": self.split_tiles}


OF_SPLIT = """\
extern "C" void of_split(const Args* args, const Rows* rows, i32 split, i32 q_begin, i32 begin, i32 end, TileRange* range) {
    *range = O(*args, *rows, {0, 0, q_begin, split}).kv_tiles(begin, end);
}
"""


@hypothesis.settings(max_examples=150, derandomize=True, database=None, deadline=None)
@hypothesis.given(
    st.one_of(KINDS["full"], CAUSAL, WINDOW, SAME), LENGTHS, LENGTHS, st.integers(1, 9), st.integers(1, 3),
    st.sampled_from([128, 192]), st.sampled_from([32, 48, 128]),
)  # fmt: skip
def test_splits_of_tiles(mask: Mask, q_len: int, kv_len: int, splits: int, least: int, tile_q: int, tile_kv: int) -> None:
    """They follow each other, are of equal sizes but for one tile, none of less than ``least``, and are all that a work visits;
    each part of its queries has what it needs of them. Which tiles are full is no matter of splits."""
    whole = OnHost(mask, MASK + TILES, (q_len, kv_len), (tile_q, tile_kv))
    split = OnHost(Parts(mask, splits, least), OF_SPLIT, (q_len, kv_len), (tile_q, tile_kv))

    def of_split(i: int, first: int, begin: int, end: int) -> list[int]:
        ends = (ctypes.c_int * 4)()
        split.library.of_split(*split.arguments[:2], i, first, begin, end, ends)
        return list(ends)

    for first in range(0, q_len, tile_q):
        last = min(first + tile_q, q_len)
        begin, *full, end = whole.tiles("kv_tiles", first, last)
        found = [of_split(i, first, first, last) for i in range(splits)]
        sizes = [part[3] - part[0] for part in found]
        count = max(1, min(splits, max(0, end - begin) // least))
        assert sum(sizes) == max(0, end - begin) and max(sizes[:count]) - min(sizes[:count]) <= 1 and not any(sizes[count:])
        some = [part for part in found if part[0] < part[3]]
        assert [part[0] for part in some] == [begin, *(part[3] for part in some[:-1])][: len(some)]
        assert all(part[1:3] == full for part in some)
        for at in range(first, last, 64):
            own = whole.tiles("kv_tiles", at, min(at + 64, last))
            parts = [of_split(i, first, at, min(at + 64, last)) for i in range(splits)]
            assert [tile for part in parts for tile in range(part[0], part[3])] == [*range(own[0], own[3])]
