"""This module tests what the TMA is told, as arithmetic: which bytes it then reads, and what it could not read."""

from __future__ import annotations

import itertools
import pathlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.array import tma
from rawattn.array.tma import (
    ALIGNMENT,
    RAGGED_STRIDE_LIMIT,
    STRIDE_LIMIT,
    Geometry,
    geometry,
    tma_unsupported_reason,
    unaligned_reason,
)
from rawattn.errors import ProblemError

ROOT = pathlib.Path(__file__).resolve().parents[3]
WRAP = 1 << 64  # of the engine's addresses
BOUND = 1 << 30  # of tile/tma_tensor.cuh


def address(found: Geometry, *coordinates: int) -> int | None:
    """Offset of the element that the engine reads, in bytes of a 16-bit format; None where it fills in a zero instead."""
    if any(not 0 <= at < size for at, size in zip(coordinates, found.sizes, strict=True)):
        return None
    column, *rest = coordinates
    return (2 * column + sum(at * stride for at, stride in zip(rest, found.strides, strict=True))) % WRAP


def views() -> dict[str, np.ndarray]:
    """Arrays (batch, rows, heads, columns) as users have them."""
    whole = np.zeros((3, 5, 4, 16), np.uint16)
    qkv = np.zeros((3, 5, 3, 4, 16), np.uint16)
    return {
        "contiguous": whole,
        "heads first": np.zeros((3, 4, 5, 16), np.uint16).transpose(0, 2, 1, 3),
        "rows first": np.zeros((5, 3, 4, 16), np.uint16).transpose(1, 0, 2, 3),
        "slice of qkv": qkv[:, :, 1],
        "every other row": whole[:, ::2],
        "first columns": whole[..., :8],
        "expanded heads": np.broadcast_to(whole[:, :, :1], whole.shape),
        "expanded batch": np.broadcast_to(whole[:1], whole.shape),
        "one row": whole[:, :1],
        "one of everything": whole[:1, :1, :1],
    }


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in views() if name != "expanded heads"])
def test_map_of_several_heads_reads_each_element_where_it_lies(name: str, heads: int) -> None:
    array = views()[name]
    found = tma.heads_geometry("q", array.shape, tuple(stride // 2 for stride in array.strides), 2, heads, 64)
    check_limits(found)
    assert found.box == (64, heads, 64 // heads, 1, 1) and found.head_step == 1
    for batch, row, head, column in itertools.product(*map(range, array.shape)):
        where = sum(at * stride for at, stride in zip((batch, row, head, column), array.strides, strict=True))
        assert address(found, column, head, row, batch * found.batch_step, 0) == where
    for axis in (1, 2):  # heads, rows
        assert address(found, *(found.sizes[axis] * (at == axis) for at in range(5))) is None


@pytest.mark.parametrize("name", views())
def test_dense_map_reads_each_element_where_it_lies(name: str) -> None:
    array = views()[name]
    strides = tuple(stride // 2 for stride in array.strides)
    assert tma_unsupported_reason("q", array.shape, strides, 2) is None
    found = geometry(array.shape, strides, 2, 64)
    check_limits(found)
    assert found.box == (64, 64, 1, 1)
    for batch, row, head, column in itertools.product(*map(range, array.shape)):
        where = sum(at * stride for at, stride in zip((batch, row, head, column), array.strides, strict=True))
        assert address(found, column, row, head * found.head_step, batch * found.batch_step) == where
    assert address(found, 0, array.shape[1], 0, 0) is None, "rows past the end are zeros"
    assert address(found, array.shape[3], 0, 0, 0) is None, "so are columns"


def check_limits(found: Geometry) -> None:
    """Checks what cuTensorMapEncodeTiled asks for."""
    assert len(found.sizes) == len(found.box) == len(found.strides) + 1 <= 5
    assert all(0 < size <= 1 << 32 for size in found.sizes)
    assert all(stride % 16 == 0 and 0 < stride < STRIDE_LIMIT for stride in found.strides)
    assert all(0 < rows <= 256 for rows in found.box) and found.box[0] * 2 == 128


@given(
    row_bytes=st.integers(1, RAGGED_STRIDE_LIMIT // 16 - 1).map(lambda n: 16 * n),
    heads=st.integers(1, 256),
    head_bytes=st.integers(1, 1 << 12).map(lambda n: 16 * n),
    first=st.integers(0, BOUND - 1),
    length=st.integers(0, BOUND - 1),
    data=st.data(),
)
def test_ragged_map_reads_one_sequence(
    row_bytes: int, heads: int, head_bytes: int, first: int, length: int, data: st.DataObject
) -> None:
    """The coordinates that tile/tma_tensor.cuh computes give the rows of a sequence, and zeros past its end."""
    columns = 64
    found = geometry((max(2, first + length), heads, columns), (row_bytes // 2, head_bytes // 2, 1), 2, 128)
    check_limits(found)
    assert found.box == (64, 128, 1, 1, 1)
    head = data.draw(st.integers(0, heads - 1))

    def read(row: int) -> int | None:
        return address(found, 8, BOUND - length + row, head * found.head_step, BOUND, first + length)

    near_end = st.integers(length - 3, length - 1) | st.integers(0, max(0, length - 1))
    for row in data.draw(st.lists(near_end, max_size=5)):
        if 0 <= row < length:
            assert read(row) == ((first + row) * row_bytes + head * head_bytes * (heads > 1) + 16) % WRAP
    for row in data.draw(st.lists(st.integers(length, length + 4096), min_size=1, max_size=5)):
        assert read(row) is None


def test_ragged_map_over_every_row_of_a_packed_array() -> None:
    array = np.zeros((23, 3, 3, 16), np.uint16)[:, 1]  # k of a packed qkv
    found = geometry(array.shape, tuple(stride // 2 for stride in array.strides), 2, 64)
    for first, last in itertools.pairwise((0, 0, 1, 9, 9, 23)):
        for row, head, column in itertools.product(range(24), range(3), range(16)):
            where = address(found, column, BOUND - (last - first) + row, head, BOUND, last)
            inside = row < last - first
            assert where == ((first + row) * array.strides[0] + head * array.strides[1] + 2 * column if inside else None)


def test_ragged_bound_is_the_kernels() -> None:
    text = (ROOT / "cuda_src" / "tile" / "tma_tensor.cuh").read_text()
    (shift,) = re.findall(r"bound = 1 << (\d+);", text)
    assert 1 << int(shift) == BOUND == geometry((4, 1, 64), (64, 64, 1), 2, 64).sizes[1]
    assert (BOUND * RAGGED_STRIDE_LIMIT) % WRAP == 0


SHAPE, STRIDES = (2, 32, 4, 64), (8192, 256, 64, 1)
MISFITS = {
    "pointer": (SHAPE, STRIDES, 8, "k begins at an address that is no multiple of 16 bytes", "k.clone()"),
    "head stride": (SHAPE, (8192, 260, 65, 1), 0, "k has a row stride of 520 bytes", "positive multiple of 16"),
    "row stride": (SHAPE, (8192, 260, 64, 1), 0, "k has a row stride of 520 bytes", "k.contiguous()"),
    "batch stride": (SHAPE, (8196, 256, 64, 1), 0, "k has a batch stride of 16392 bytes", "cupy.ascontiguousarray(k)"),
    "expanded rows": (SHAPE, (8192, 0, 64, 1), 0, "k has a row stride of 0 bytes", "positive"),
    "backwards": (SHAPE, (8192, -256, 64, 1), 0, "k has a row stride of -512 bytes", "positive"),
    "too far": (SHAPE, (1 << 39, 256, 64, 1), 0, f"k has a batch stride of {1 << 40} bytes", "below 2^40"),
    "packed rows too far": ((32, 4, 64), (1 << 33, 64, 1), 0, f"k has a row stride of {1 << 34} bytes", "below 2^34"),
    "packed head stride": ((32, 4, 64), (256, 60, 1), 0, "k has a head stride of 120 bytes", "k.contiguous()"),
}


@pytest.mark.parametrize("shape, strides, pointer, found, need", MISFITS.values(), ids=MISFITS)
def test_misfit(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int, found: str, need: str) -> None:
    reason = tma_unsupported_reason("k", shape, strides, 2, pointer)
    assert reason is not None and found in reason and need in reason


@pytest.mark.parametrize(
    "shape, strides, pointer",
    [
        (SHAPE, STRIDES, 4096),
        (SHAPE, (0, 256, 0, 1), ALIGNMENT),  # expanded batch and heads are one row of the map
        ((1, 1, 1, 64), (3, 5, 7, 1), 0),  # a stride that is never used may be anything
        ((2, 0, 4, 64), (1, 1, 1, 1), 1),  # of an empty array nothing is read
        ((32, 4, 64), (256, 64, 1), 0),
    ],
)
def test_no_misfit(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int) -> None:
    assert tma_unsupported_reason("k", shape, strides, 2, pointer) is None


def test_misfit_asks_of_a_packed_row_what_the_ragged_map_can_hold() -> None:
    widest = (RAGGED_STRIDE_LIMIT - 16) // 2
    assert tma_unsupported_reason("k", (32, 4, 64), (widest, 64, 1), 2) is None
    assert all(stride > 0 for stride in tma.geometry((32, 4, 64), (widest, 64, 1), 2, 64).strides)


# ---- threads that read 16 bytes ------------------------------------------------------------------------------------------

UNALIGNED = {
    "pointer": (SHAPE, STRIDES, 8, "k has an address or a stride that is no multiple of 16 bytes", "k.clone()"),
    "batch stride": (SHAPE, (8196, 256, 64, 1), 0, "no multiple of 16 bytes", "k.copy()"),
    "row stride": (SHAPE, (8192, 260, 64, 1), 0, "no multiple of 16 bytes", "k.clone()"),
    "head stride": ((32, 4, 64), (256, 60, 1), 0, "no multiple of 16 bytes", "k.clone()"),
    "backwards": (SHAPE, (8192, -256, 64, 1), 0, "k has a row stride of -512 bytes; it must be from 0 to 2^32", "k.contiguous()"),
    "too far": (SHAPE, (8192, 1 << 31, 64, 1), 0, f"k has a row stride of {1 << 32} bytes", "cupy.ascontiguousarray(k)"),
}


@pytest.mark.parametrize("shape, strides, pointer, found, need", UNALIGNED.values(), ids=UNALIGNED)
def test_unaligned(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int, found: str, need: str) -> None:
    reason = unaligned_reason("k", shape, strides, 2, pointer)
    assert reason is not None and found in reason and need in reason


@pytest.mark.parametrize(
    "shape, strides, pointer",
    [
        (SHAPE, STRIDES, 4096),
        (SHAPE, (8192, 0, 0, 1), ALIGNMENT),  # one row for all
        (SHAPE, (-8192, 256, -64, 1), 0),
        (SHAPE, (1 << 40, (1 << 31) - 8, 64, 1), 0),
        ((1, 1, 1, 64), (3, 1 << 40, 7, 1), 0),
        ((2, 0, 4, 64), (1, 1, 1, 1), 1),
        ((32, 4, 64), (256, 64, 1), 0),
        ((32, 4, 3), (256, 64, 5), 0),  # whose columns another check is for
    ],
)
def test_aligned(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int) -> None:
    assert unaligned_reason("k", shape, strides, 2, pointer) is None


def test_strides_count_in_bytes() -> None:
    assert (
        unaligned_reason("k", SHAPE, (8192, 260, 64, 1), 4) is None is tma_unsupported_reason("k", SHAPE, (8192, 260, 64, 1), 4)
    )
    limit = STRIDE_LIMIT // 4
    assert tma_unsupported_reason("k", SHAPE, (limit - 4, 256, 64, 1), 4) is None
    assert "batch stride" in str(tma_unsupported_reason("k", SHAPE, (limit, 256, 64, 1), 4))
    assert "head stride" in str(tma_unsupported_reason("k", (32, 4, 64), (256, limit, 1), 4))
    assert tma_unsupported_reason("k", (32, 4, 64), (256, limit - 4, 1), 4) is None, "of heads the usual limit"


@pytest.mark.parametrize("shape, strides, pointer, found, need", [*MISFITS.values(), *UNALIGNED.values()])
def test_what_has_a_reason_is_not_readable(
    shape: tuple[int, ...], strides: tuple[int, ...], pointer: int, found: str, need: str
) -> None:
    assert not tma.readable(shape, strides, 2, pointer)


@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from([8, 64])),
    st.tuples(*[st.integers(-2, 4).map(lambda n: 8 * n) | st.sampled_from([4, 1 << 31, 1 << 38, 1 << 39])] * 3),
    st.sampled_from([0, 2, 8, 16]),
)
def test_what_is_readable_has_no_reason(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int) -> None:
    if tma.readable(shape, (*strides, 1), 2, pointer):
        assert tma_unsupported_reason("k", shape, (*strides, 1), 2, pointer) is None
        assert unaligned_reason("k", shape, (*strides, 1), 2, pointer) is None


def test_plain_arrays_are_readable() -> None:
    for shape, strides in (
        (SHAPE, STRIDES),
        ((1, 1, 1, 8), (3, 5, 7, 1)),
        (SHAPE, (8192, (1 << 31) - 8, 64, 1)),
        (SHAPE, (8, 8, 8, 1)),
    ):
        assert tma.readable(shape, strides, 2, 4096)


# ---- maps of several heads, and of pages ---------------------------------------------------------------------------------


def test_heads_side_by_side() -> None:
    """The map of q for tiles whose rows are queries of several heads, of one length and end to end."""
    same = tma.heads_geometry("q", (3, 70, 8, 128), (71680, 1024, 128, 1), 2, 4, 128)
    assert same.sizes == (128, 8, 70, 3, 1) and same.box == (64, 4, 32, 1, 1)
    assert same.strides[:3] == (256, 2048, 143360) and same.batch_step == 1
    assert tma.heads_geometry("q", (3, 70, 8, 128), (0, 1024, 128, 1), 2, 4, 128).batch_step == 0
    ends = tma.heads_geometry("q", (70, 8, 128), (1024, 128, 1), 2, 8, 64)
    assert ends.sizes[2] == 1 << 30 and ends.strides == (256, 2048, (1 << 34) - 2048, 2048) and ends.box[1:3] == (8, 8)
    with pytest.raises(ProblemError, match="q has a head stride of 0"):
        tma.heads_geometry("q", (70, 8, 128), (1024, 0, 1), 2, 8, 64)


def test_pools_that_tma_reads() -> None:
    """Any strides: of pages with gaps between them, interleaved, of one page; a pool that is too large is refused."""
    found = tma.page_rows_geometry("k_cache", (7, 16, 8, 128), (40960, 1024, 128, 1), 2, 16)
    assert (found.page_steps, found.row_steps, found.head_step) == (40, 1, 1)
    assert found.strides == (2048, 256, (1 << 34) - 2048, 2048) and found.box == (64, 16, 1, 1, 1)
    odd = tma.page_rows_geometry("k_cache", (7, 16, 1, 128), (2056, 128, 3, 1), 2, 16)
    assert (odd.page_steps, odd.row_steps, odd.head_step, odd.strides[-1]) == (257, 16, 0, 16)
    large = tma.page_rows_geometry("k_cache", (1 << 22, 64, 8, 128), (65536, 1024, 128, 1), 2, 64)
    assert large.page_steps == 64, "2^28 rows, 2^38 elements"
    one = tma.page_rows_geometry("k_cache", (1, 1, 2, 64), (0, 0, 64, 1), 2, 8)
    assert (one.page_steps, one.strides[0]) == (0, 16)
    with pytest.raises(ProblemError, match="k_cache has 67108864 pages 2064 bytes apart"):
        tma.page_rows_geometry("k_cache", (1 << 26, 16, 1, 64), (1032, 64, 1, 1), 2, 16)


def test_rows_of_packed_heads() -> None:
    """The same shifts as in the map of one head, past the heads."""
    array = np.zeros((23, 3, 4, 16), np.uint16)[:, 1]
    found = tma.heads_geometry("q", array.shape, tuple(stride // 2 for stride in array.strides), 2, 2, 64)
    check_limits(found)
    for (first, last), head in itertools.product([(0, 9), (9, 9), (9, 23)], range(4)):
        for row in range(16):
            where = address(found, 5, head, BOUND - (last - first) + row, BOUND, last)
            inside = row < last - first
            assert where == ((first + row) * array.strides[0] + head * array.strides[1] + 10 if inside else None)
    one = tma.heads_geometry("q", (1, 1, 64), (3, 5, 1), 2, 1, 64)
    assert one.strides == (16, 16, RAGGED_STRIDE_LIMIT - 16, 16) and (one.head_step, one.batch_step) == (1, 0)


@pytest.mark.parametrize(
    "columns, itemsize, panel", [(128, 2, 64), (64, 1, 64), (96, 2, 32), (16, 2, 16), (160, 1, 32), (256, 1, 128)]
)
def test_map_of_pages_reads_each_element_where_it_lies(columns: int, itemsize: int, panel: int) -> None:
    pool = np.zeros((3, 2, 2, 5, columns), f"u{itemsize}")[:, 1].transpose(0, 2, 1, 3)  # heads first, beside another pool
    found = tma.page_geometry(pool.shape, tuple(stride // itemsize for stride in pool.strides), itemsize, 4)
    assert found.box == (panel, 4, columns // panel, 1, 1) and found.sizes == (panel, 5, columns // panel, 2, 3)
    for page, row, head, column in itertools.product(*map(range, pool.shape)):
        at = (row, column // panel, head, page)
        where = itemsize * (column % panel) + sum(x * stride for x, stride in zip(at, found.strides, strict=True))
        assert where == sum(x * s for x, s in zip((page, row, head, column), pool.strides, strict=True))
    assert tma.page_geometry((1, 1, 1, 64), (3, 5, 7, 1), 2, 1).strides == (16, 128, 16, 16), "of one, any stride"


@pytest.mark.parametrize("pages, rows, heads", [(7, 16, 4), (1, 16, 4), (7, 1, 4), (7, 16, 1)])
def test_map_of_page_rows_reads_each_element_where_it_lies(pages: int, rows: int, heads: int) -> None:
    """Boxes end where the rows of a page that count do; from there on are zeros."""
    array = np.zeros((pages, heads, rows + 1, 16), np.uint16)[:, :, :rows].transpose(0, 2, 1, 3)
    found = tma.page_rows_geometry("k_cache", array.shape, tuple(stride // 2 for stride in array.strides), 2, 8)
    assert found.sizes[:3] == (16, BOUND, heads) and found.box == (64, 8, 1, 1, 1) and found.head_step == (heads > 1)
    whole = Geometry(*found[:4], 0)
    check_limits(whole)
    for page, head, end in itertools.product(range(pages), range(heads), range(1, rows + 1)):
        steps = page * found.page_steps + end * found.row_steps
        for row in range(end + 1):
            where = address(whole, 3, BOUND - end + row, head * found.head_step, BOUND, steps)
            plain = sum(x * s for x, s in zip((page, row, head, 3), array.strides, strict=True))
            assert where == (plain if row < end else None)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (0, 1, 2, 3)], ids=["HND", "NHD"])
@pytest.mark.parametrize("pages, heads, columns", [(7, 4, 128), (1, 4, 64), (7, 1, 256), (1, 1, 64)])
def test_map_of_page_boxes_reads_each_element_where_it_lies(order: tuple[int, ...], pages: int, heads: int, columns: int) -> None:
    """Eight rows of all panels, then the next eight; and past the last page nothing, whatever the strides."""
    lies = [(pages, 16, heads, columns)[axis] for axis in order]
    array = np.zeros((2, *lies), np.uint16)[1].transpose(order)
    found = tma.page_boxes_geometry("k_cache", array.shape, tuple(stride // 2 for stride in array.strides), 2)
    check_limits(Geometry(*found[:3], 0, 0))
    assert found.box == (64, 8, columns // 64, 2, 1) and found.sizes[:4] == found.box[:4]
    for page, row, head, column in itertools.product(range(pages), range(16), range(heads), range(0, columns, 24)):
        place = page * found.page_steps + head * found.head_steps
        at = row % 8, column // 64, row // 8, place
        where = column % 64 * 2 + sum(x * stride for x, stride in zip(at, found.strides, strict=True))
        assert where == sum(x * s for x, s in zip((page, row, head, column), array.strides, strict=True))
        assert place < found.sizes[4]
    with pytest.raises(
        ProblemError, match="k_cache has 1073741825 pages 4096 bytes apart, of 2 heads 2048 bytes apart; TMA counts"
    ):
        tma.page_boxes_geometry("k_cache", ((1 << 30) + 1, 8, 2, 64), (2048, 64, 1024, 1), 2)


def test_pool_of_one_head_for_all() -> None:
    found = tma.page_rows_geometry("k_cache", (7, 16, 8, 64), (1024, 64, 0, 1), 2, 16)
    assert (found.sizes[2], found.strides[1], found.head_step) == (1, 16, 0)


def test_pools_at_the_limit_of_steps() -> None:
    """The last step that the map has is a row of the last page."""
    limit = (1 << 31) - 1

    def pool(pages: int, rows: int = 16, row_elements: int = 8) -> tma.PageRowsGeometry:
        return tma.page_rows_geometry("k_cache", (pages, rows, 1, 8), (8 * 16, row_elements, 8, 1), 2, 8)

    fits = (limit - 1) // 16
    assert pool(fits).page_steps == 16 and pool(fits).sizes[3:] == (limit, limit)
    with pytest.raises(
        ProblemError, match=rf"k_cache has {fits + 1} pages 256 bytes apart, of 16 rows 16 bytes apart; TMA counts"
    ):
        pool(fits + 1)
    with pytest.raises(ProblemError, match="k_cache has 1 pages 0 bytes apart"):
        pool(1, row_elements=1 << 33)
    assert pool(1, row_elements=(1 << 33) - 8).strides[2] == 16


def test_strides_that_are_never_used_may_be_anything() -> None:
    found = geometry((1, 1, 1, 64), (3, 5, 7, 1), 2, 64)
    assert found.strides == (16, 16, 16) and (found.head_step, found.batch_step) == (0, 0)
