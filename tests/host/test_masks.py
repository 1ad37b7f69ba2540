"""The mask files, compiled for the host, against what the masks in Python say of every single (query, key) pair."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from rawattn import render
from rawattn.variant.mask import ALIGNMENTS, Both, Causal, Full, Mask, Window, of_head
from rawattn.variant.offset import OffsetMask
from tests import native, options

Offsets = tuple[int, int] | None
# A mask, and what a kernel asks it.
TEXT = """\
using Number = float;
namespace cfg {{ extern "C" {{ i32 tile_q, tile_kv; {constants} }} }}
struct Args {{ {fields} }};
struct Rows {{
    i32 q_len, kv_len, has_offset, q_offset, kv_offset;
    i32 shift(i32 to_last) const {{ return has_offset ? q_offset - kv_offset : to_last * (kv_len - q_len); }}
}};
{includes}
using M = {type};
extern "C" void kv_tiles(const Args* args, const Rows* rows, i32 head, i32 q_begin, i32 q_end, TileRange* found) {{
    *found = M(*args, *rows, {{0, head, 0, 0}}).kv_tiles(q_begin, q_end);
}}
extern "C" void q_tiles(const Args* args, const Rows* rows, i32 head, i32 kv_begin, i32 kv_end, TileRange* found) {{
    *found = M(*args, *rows, {{0, head, 0, 0}}).q_tiles(kv_begin, kv_end);
}}
extern "C" void keep(const Args* args, const Rows* rows, i32 head, i32 keys, bool* kept) {{
    const M mask(*args, *rows, {{0, head, 0, 0}});
    for (i32 q = 0; q < rows->q_len; ++q)
        for (i32 first = 0; first < keys; first += cfg::tile_kv)
            for (i32 offset = 0; offset < cfg::tile_kv; ++offset) *kept++ = mask.row(q, first).keep(offset);
}}
"""
Cuda = Callable[[Mask], ctypes.CDLL]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Cuda:
    """Compiles the type of a mask, once."""
    known: dict[str, ctypes.CDLL] = {}

    def compiled(mask: Mask) -> ctypes.CDLL:
        if mask.cuda_type not in known:
            text = TEXT.format(
                type=mask.cuda_type, constants="".join(f"i32 {name}; " for name in mask.constants),
                fields="".join(f"{field.ctype} {field.name}; " for field in mask.fields),
                includes="\n".join(f'#include "{source}"' for source in mask.sources),
            )  # fmt: skip
            known[mask.cuda_type] = native.library(text, tmp_path_factory.mktemp("masks"))
        return known[mask.cuda_type]

    return compiled


class Asked:
    """A mask of the CUDA files, for one sequence; ``offsets``: the positions of its first query and key."""

    def __init__(
        self,
        cuda: Cuda,
        mask: Mask,
        q_len: int,
        kv_len: int,
        tile_kv: int,
        tile_q: int = 64,
        offsets: Offsets = None,
        head: int = 0,
    ) -> None:
        self._cuda = cuda(mask)
        for name, value in {"tile_q": tile_q, "tile_kv": tile_kv, **mask.constants}.items():
            ctypes.c_int.in_dll(self._cuda, name).value = value
        args = render.layout(mask.fields).pack.pack(*(mask.values[field.name] for field in mask.fields))
        rows = (q_len, kv_len, offsets is not None, *(offsets or (0, 0)))
        self._given = ctypes.create_string_buffer(args, max(1, len(args))), (ctypes.c_int * 5)(*rows), head

    def tiles(self, which: str, begin: int, end: int) -> list[int]:
        found = (ctypes.c_int * 4)()
        getattr(self._cuda, which)(*self._given, begin, end, found)
        return list(found)

    def keep(self, rows: int, keys: int) -> npt.NDArray[np.bool_]:
        kept = np.zeros((rows, keys), bool)
        self._cuda.keep(*self._given, keys, kept.ctypes.data_as(ctypes.c_void_p))
        return kept


def visited(found: list[int], needed: npt.NDArray[np.bool_], full: npt.NDArray[np.bool_], exact: bool) -> tuple[int, int]:
    """The tiles that ``found`` visits, after it is compared with what it must be."""
    begin, full_begin, full_end, end = found
    tile = np.arange(len(needed))
    is_visited, is_full = (tile >= begin) & (tile < end), (tile >= full_begin) & (tile < full_end)
    assert is_visited[needed].all(), "a kept pair lies in a tile that is not visited"
    assert begin >= end or (begin >= 0 and end <= len(tile)), "a tile that does not exist is visited"
    assert ((is_full & is_visited) == full).all(), "a tile is taken for full that is not, or the reverse"
    assert not exact or (is_visited == needed).all(), "a tile is visited in vain"
    return begin, end


def check(
    cuda: Cuda, mask: Mask, q_len: int, kv_len: int, tile_q: int, strip: int, tile_kv: int, offsets: Offsets = None,
    head: int = 0,
) -> None:  # fmt: skip
    """Everything that a kernel relies on, for blocks of ``tile_q`` queries of which a warpgroup has ``strip``."""
    asked = Asked(cuda, mask, q_len, kv_len, tile_kv, tile_q, offsets, head)
    aligned = offsets is None
    begin, end = of_head(mask if offsets is None else OffsetMask(mask, *offsets), head).interval(np.arange(q_len), q_len, kv_len)
    tiles, q_tiles = -(-kv_len // tile_kv), -(-q_len // tile_q)
    keys = np.arange(tiles * tile_kv)
    kept = (keys >= begin[:, None]) & (keys < end[:, None])
    assert (asked.keep(q_len, len(keys)) == kept).all()
    exact = not aligned or len(set(mask.constants.values())) < 2  # with two alignments a block's hull may be wider

    def of_rows(first: int, count: int) -> tuple[int, int]:
        last = min(first + count, q_len)
        by_tile = kept[first:last].reshape(last - first, tiles, tile_kv)
        return visited(asked.tiles("kv_tiles", first, last), by_tile.any((0, 2)), by_tile.all((0, 2)), exact)

    for first in range(0, q_len, tile_q):
        block = of_rows(first, tile_q)
        for part in range(first, min(first + tile_q, q_len), strip):
            own = of_rows(part, strip)
            assert own[0] >= own[1] or (block[0] <= own[0] and own[1] <= block[1]), (
                "a warpgroup needs a tile that its block does not load"
            )
    starts = np.arange(q_tiles) * tile_q
    for first in range(0, kv_len, tile_kv):
        for last in {first + tile_kv, min(first + tile_kv, kv_len)}:  # past the last key, which no query keeps, and not
            part = np.zeros((q_len, last - first), bool)
            part[:, : kv_len - first] = kept[:, first : min(last, kv_len)]
            needed = np.logical_or.reduceat(part.any(1), starts) if q_tiles else np.zeros(0, bool)
            full = np.logical_and.reduceat(part.all(1), starts) if q_tiles else needed
            visited(asked.tiles("q_tiles", first, last), needed, full, exact)


def masks(sides: list[int | None]) -> list[Mask]:
    """Every kind of mask, with all these window sides."""
    found: list[Mask] = [Full()]
    for align in ALIGNMENTS:
        windows = [Window(left, right, align) for left in sides for right in sides]
        causal = [Causal(other) for other in ALIGNMENTS]
        found += [Causal(align), *windows, *itertools.starmap(Both, itertools.product(causal, windows))]
        found += [Both(window, Causal(align)) for window in windows]
    return found


def test_every_small_case(cuda: Cuda) -> None:
    for mask in masks([None, 0, 1, 4]):
        for q_len, kv_len, tile_kv in itertools.product(range(8), range(8), (2, 3)):
            check(cuda, mask, q_len, kv_len, 4, 2, tile_kv)


def offsets(largest: int) -> st.SearchStrategy[Offsets]:
    return st.none() | st.tuples(st.integers(0, largest), st.integers(0, largest))


LENGTHS = st.integers(0, 600) | st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257])
SIDES = st.none() | st.integers(0, 700) | st.sampled_from([0, 1, 2, 31, 37, 61, 63, 64, 65, 97, 127, 128, 131, 251, 257])
ALIGN = st.sampled_from(ALIGNMENTS)
WINDOW, CAUSAL = st.builds(Window, SIDES, SIDES, ALIGN), st.builds(Causal, ALIGN)
SAME = ALIGN.flatmap(lambda align: st.builds(Both, st.builds(Window, SIDES, SIDES, st.just(align)), st.just(Causal(align))))
KINDS = {
    "full": st.just(Full()),
    "causal": CAUSAL,
    "window": WINDOW,
    "both": SAME,
    "both, two alignments": st.builds(Both, CAUSAL, WINDOW),
    **options.MASKS,
}


SMALL = st.integers(0, 60)
SMALL_WINDOW = st.builds(Window, st.none() | SMALL, st.none() | SMALL, ALIGN)
SMALL_KINDS = KINDS | {
    "window": SMALL_WINDOW,
    "both": st.builds(lambda window: Both(Causal(window.align), window), SMALL_WINDOW),
    "both, two alignments": st.builds(Both, CAUSAL, SMALL_WINDOW),
}


@pytest.mark.parametrize("kind", KINDS)
def test_real_sizes(cuda: Cuda, kind: str) -> None:
    """Each kind of mask has examples of its own, with window sides that divide no tile."""

    @hypothesis.settings(max_examples=150, derandomize=True, database=None, deadline=None)
    @hypothesis.given(
        KINDS[kind], LENGTHS, LENGTHS, st.sampled_from([64, 128, 192]), st.integers(2, 16).map(lambda n: 16 * n),
        offsets(700), st.integers(0, 5),
    )  # fmt: skip
    def test(mask: Mask, q_len: int, kv_len: int, tile_q: int, tile_kv: int, offsets: Offsets, head: int) -> None:
        check(cuda, mask, q_len, kv_len, tile_q, 64, tile_kv, offsets, head)

    test()


@pytest.mark.parametrize("kind", KINDS)
def test_small_tiles(cuda: Cuda, kind: str) -> None:
    """The same with tiles so small that every bound falls on their borders in some example."""

    @hypothesis.settings(max_examples=300, derandomize=True, database=None, deadline=None)
    @hypothesis.given(
        SMALL_KINDS[kind], SMALL, SMALL, st.sampled_from([(2, 1), (4, 2), (6, 3), (14, 7)]), st.sampled_from([1, 2, 3, 5, 7, 11]),
        offsets(60), st.integers(0, 5),
    )  # fmt: skip
    def test(mask: Mask, q_len: int, kv_len: int, tile: tuple[int, int], tile_kv: int, offsets: Offsets, head: int) -> None:
        check(cuda, mask, q_len, kv_len, *tile, tile_kv, offsets, head)

    test()


def test_longest_sequences(cuda: Cuda) -> None:
    """Nothing overflows: the tiles of single queries of the longest sequences that an operation may have."""
    longest = (1 << 30) - 1
    for mask, (q_len, kv_len) in itertools.product(masks([None, 0, 5]), [(longest, longest), (longest, 7), (7, longest)]):
        asked = Asked(cuda, mask, q_len, kv_len, 128)
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
