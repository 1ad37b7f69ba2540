"""The mask files, compiled for the host, against what the masks in Python say of every single (query, key) pair."""

from __future__ import annotations

import ctypes
import itertools

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from rawattn.variant.mask import ALIGNMENTS, Both, Causal, Full, Mask, Window
from tests import native

TYPES = ["Full", "Causal", "Window", "Both<Causal, Window>", "Both<Window, Causal>"]
TEXT = """\
namespace cfg { extern "C" { i32 tile_q, tile_kv, causal_to_last, window_to_last; } }
struct Args { i32 window_left, window_right; };
struct Rows { i32 q_len, kv_len; };
#include "variant/mask/both.cuh"
#include "variant/mask/causal.cuh"
#include "variant/mask/full.cuh"
#include "variant/mask/window.cuh"
"""
# What a kernel asks a mask, of type number {index}.
QUESTIONS = """\
extern "C" void tiles_{index}(const Args* args, const Rows* rows, i32 q_begin, i32 q_end, TileRange* found) {{
    *found = {type}(*args, *rows).tiles(q_begin, q_end);
}}
extern "C" void keep_{index}(const Args* args, const Rows* rows, i32 keys, bool* kept) {{
    const {type} mask(*args, *rows);
    for (i32 q = 0; q < rows->q_len; ++q)
        for (i32 first = 0; first < keys; first += cfg::tile_kv)
            for (i32 offset = 0; offset < cfg::tile_kv; ++offset) *kept++ = mask.row(q, first).keep(offset);
}}
"""


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    text = TEXT + "".join(QUESTIONS.format(index=index, type=name) for index, name in enumerate(TYPES))
    return native.library(text, tmp_path_factory.mktemp("masks"))


class Asked:
    """A mask of the CUDA files, for one sequence."""

    def __init__(self, cuda: ctypes.CDLL, mask: Mask, q_len: int, kv_len: int, tile_kv: int) -> None:
        for name, value in {"tile_kv": tile_kv, **mask.constants}.items():
            ctypes.c_int.in_dll(cuda, name).value = value
        index, values = TYPES.index(mask.cuda_type), {"window_left": 0, "window_right": 0, **mask.values}
        self._tiles, self._keep = getattr(cuda, f"tiles_{index}"), getattr(cuda, f"keep_{index}")
        self._given = (ctypes.c_int * 2)(*values.values()), (ctypes.c_int * 2)(q_len, kv_len)

    def tiles(self, q_begin: int, q_end: int) -> list[int]:
        found = (ctypes.c_int * 4)()
        self._tiles(*self._given, q_begin, q_end, found)
        return list(found)

    def keep(self, rows: int, keys: int) -> npt.NDArray[np.bool_]:
        kept = np.zeros((rows, keys), bool)
        self._keep(*self._given, keys, kept.ctypes.data_as(ctypes.c_void_p))
        return kept


def check(cuda: ctypes.CDLL, mask: Mask, q_len: int, kv_len: int, tile_q: int, strip: int, tile_kv: int) -> None:
    """Everything that a kernel relies on, for blocks of ``tile_q`` queries of which a warpgroup has ``strip``."""
    asked = Asked(cuda, mask, q_len, kv_len, tile_kv)
    begin, end = mask.interval(np.arange(q_len), q_len, kv_len)
    tiles = -(-kv_len // tile_kv)
    keys = np.arange(tiles * tile_kv)
    kept = (keys >= begin[:, None]) & (keys < end[:, None])
    assert (asked.keep(q_len, len(keys)) == kept).all()

    def visited(first: int, count: int) -> tuple[int, int]:
        rows = slice(first, min(first + count, q_len))
        begin, full_begin, full_end, end = asked.tiles(rows.start, rows.stop)
        by_tile, tile = kept[rows].reshape(rows.stop - rows.start, tiles, tile_kv), np.arange(tiles)
        is_visited, is_full = (tile >= begin) & (tile < end), (tile >= full_begin) & (tile < full_end)
        needed = by_tile.any((0, 2))
        assert is_visited[needed].all(), "a kept pair lies in a tile that is not visited"
        assert begin >= end or (begin >= 0 and end <= tiles), "a tile that does not exist is visited"
        assert ((is_full & is_visited) == by_tile.all((0, 2))).all(), "a tile is taken for full that is not, or the reverse"
        if len(set(mask.constants.values())) < 2:  # with two alignments a block's hull may be wider
            assert (is_visited == needed).all(), "a tile is visited in vain"
        return begin, end

    for first in range(0, q_len, tile_q):
        block = visited(first, tile_q)
        for part in range(first, min(first + tile_q, q_len), strip):
            own = visited(part, strip)
            assert own[0] >= own[1] or (block[0] <= own[0] and own[1] <= block[1]), (
                "a warpgroup needs a tile that its block does not load"
            )


def masks(sides: list[int | None]) -> list[Mask]:
    """Every kind of mask, with all these window sides."""
    found: list[Mask] = [Full()]
    for align in ALIGNMENTS:
        windows = [Window(left, right, align) for left in sides for right in sides]
        causal = [Causal(other) for other in ALIGNMENTS]
        found += [Causal(align), *windows, *itertools.starmap(Both, itertools.product(causal, windows))]
        found += [Both(window, Causal(align)) for window in windows]
    return found


def test_every_small_case(cuda: ctypes.CDLL) -> None:
    for mask in masks([None, 0, 1, 4]):
        for q_len, kv_len, tile_kv in itertools.product(range(8), range(8), (2, 3)):
            check(cuda, mask, q_len, kv_len, 4, 2, tile_kv)


LENGTHS = st.integers(0, 600) | st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])


@hypothesis.settings(max_examples=500, derandomize=True)
@hypothesis.given(
    st.sampled_from(masks([None, 0, 1, 63, 64, 100, 1000])), LENGTHS, LENGTHS, st.sampled_from([64, 128, 192]),
    st.integers(2, 16).map(lambda n: 16 * n),
)  # fmt: skip
def test_real_sizes(cuda: ctypes.CDLL, mask: Mask, q_len: int, kv_len: int, tile_q: int, tile_kv: int) -> None:
    check(cuda, mask, q_len, kv_len, tile_q, 64, tile_kv)


def test_longest_sequences(cuda: ctypes.CDLL) -> None:
    """Nothing overflows: the tiles of single queries of the longest sequences that a problem may have."""
    longest = (1 << 30) - 1
    for mask, (q_len, kv_len) in itertools.product(masks([None, 0, 5]), [(longest, longest), (longest, 7), (7, longest)]):
        asked = Asked(cuda, mask, q_len, kv_len, 128)
        for q in (0, q_len - 7, q_len - 1):
            begin, end = (int(bound[0]) for bound in mask.interval(np.array([q]), q_len, kv_len))
            first, _, _, last = asked.tiles(q, q + 1)
            if begin < end:
                assert (first, last) == (begin // 128, -(-end // 128)), (mask, q_len, kv_len, q)
            else:
                assert first >= last or len(set(mask.constants.values())) == 2, (mask, q_len, kv_len, q)
