"""This module says which arrays the Tensor Memory Accelerator (TMA) or threads can read 16 bytes at a time, by shape, strides
and pointer.

The driver checks what TMA needs when it makes a tensor map, but only on a machine that has one, and it gives no reason.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..errors import ProblemError

ALIGNMENT = 16  # bytes, of pointers and strides
STRIDE_LIMIT = 1 << 40  # bytes
ROW_LIMIT = 1 << 32  # bytes, of a row stride that threads compute with
BOX_COLUMNS = 64  # one 128-byte swizzle span of a 16-bit format
SWIZZLE_ROWS = 8  # after which a swizzle repeats
RAGGED_STRIDE_LIMIT = 1 << 34  # bytes; times the rows, 2^30, it wraps around 64 bits
_RAGGED_ROWS, _RAGGED_EXTENT = 1 << 30, (1 << 31) - 1  # of rows; of the two shifting dimensions (tile/tma_tensor.cuh)


def begins_box(column: int, itemsize: int) -> bool:
    """Says whether a box of swizzled panels may begin at this column, which must be at a multiple of 16 bytes: an H200 answered
    loads and stores of others with "an illegal instruction was encountered" (perf/notes/functions.md)."""
    return column * itemsize % ALIGNMENT == 0


class Geometry(NamedTuple):
    """A tensor map but for its pointer, and the factors on the head and batch coordinates (0 where the stride is 0)."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    head_step: int
    batch_step: int


def tma_unsupported_reason(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, pointer: int = 0
) -> str | None:
    """Returns why TMA cannot read the array ``name``, (batch, rows, heads, columns) or (rows, heads, columns), with strides in
    elements; None where it can."""
    if 0 in shape:
        return None
    if pointer % ALIGNMENT:
        fix = f"{name}.clone() in torch, {name}.copy() in CuPy"
        return f"{name} begins at an address that is no multiple of {ALIGNMENT} bytes, as TMA needs; copy it: {fix}"
    axes = ("batch", "row", "head")[-(len(shape) - 1) :]
    for axis, size, stride in zip(axes, shape, strides, strict=False):
        bytes_, limit = stride * itemsize, STRIDE_LIMIT if len(shape) == 4 or axis == "head" else RAGGED_STRIDE_LIMIT
        if size == 1 or (stride == 0 and axis != "row"):
            continue
        if bytes_ % ALIGNMENT or not 0 < bytes_ < limit:
            need = f"a positive multiple of {ALIGNMENT} bytes below 2^{limit.bit_length() - 1}"
            fix = f"{name}.contiguous() in torch, cupy.ascontiguousarray({name}) in CuPy"
            return f"{name} has a {axis} stride of {bytes_} bytes, but TMA needs {need}; copy it: {fix}"
    return None


def readable(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, pointer: int) -> bool:
    """Says whether a quick test shows that TMA and threads can read an array. If not, the functions that give reasons decide."""
    if pointer % ALIGNMENT:
        return False
    if _are_readable(strides, itemsize):
        return True
    for size, stride in zip(shape[:-1], strides, strict=False):
        if size > 1 and (stride * itemsize % ALIGNMENT or not 0 < stride * itemsize < ROW_LIMIT):
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _are_readable(strides: tuple[int, ...], itemsize: int) -> bool:
    """Says whether an array with these strides can be read whatever its shape is."""
    return all(stride * itemsize % ALIGNMENT == 0 and 0 < stride * itemsize < ROW_LIMIT for stride in strides[:-1])


def unaligned_reason(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, pointer: int = 0) -> str | None:
    """Returns why threads cannot read the rows of an array 16 bytes at a time, as ``tma_unsupported_reason`` does for TMA."""
    if 0 in shape:
        return None
    steps = [stride * itemsize for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    if any(step % ALIGNMENT for step in (pointer, *steps)):
        fix = f"{name}.clone() in torch, {name}.copy() in CuPy"
        return f"{name} has an address or a stride that is no multiple of {ALIGNMENT} bytes; copy it: {fix}"
    if shape[-3] > 1 and not 0 <= strides[-3] * itemsize < ROW_LIMIT:
        fix = f"{name}.contiguous() in torch, cupy.ascontiguousarray({name}) in CuPy"
        return f"{name} has a row stride of {strides[-3] * itemsize} bytes; it must be from 0 to 2^32; copy it: {fix}"
    return None


def geometry(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, box_rows: int) -> Geometry:
    """Returns how TMA reads a (batch, rows, heads, columns) or packed (rows, heads, columns) array that fits it."""
    columns, (heads, head_bytes, head_step) = shape[-1], _measure_axis(shape[-2], strides[-2], itemsize)
    box = (BOX_COLUMNS, box_rows, 1, 1)
    rows, row_bytes, _ = _measure_axis(shape[-3], strides[-3], itemsize)
    if len(shape) == 4:
        batch, batch_bytes, batch_step = _measure_axis(shape[0], strides[0], itemsize)
        return Geometry((columns, rows, heads, batch), (row_bytes, head_bytes, batch_bytes), box, head_step, batch_step)
    shifts = _RAGGED_EXTENT, _RAGGED_EXTENT
    shift_bytes = RAGGED_STRIDE_LIMIT - row_bytes, row_bytes
    return Geometry((columns, _RAGGED_ROWS, heads, *shifts), (row_bytes, head_bytes, *shift_bytes), (*box, 1), head_step, 0)


def _measure_axis(size: int, stride: int, itemsize: int) -> tuple[int, int, int]:
    """Size, stride in bytes and step of an axis: 1, whatever and 0 where nothing is stepped over."""
    return (1, ALIGNMENT, 0) if size == 1 or stride == 0 else (size, stride * itemsize, 1)


def heads_geometry(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, heads: int, box_rows: int
) -> Geometry:
    """Returns how TMA reads such an array in boxes of the rows of ``heads`` heads side by side, a row's heads one after the other
    (tile/tma_heads.cuh). Raises ProblemError where heads share their memory."""
    if strides[-2] == 0 and shape[-2] > 1:
        raise ProblemError(f"{name} has a head stride of 0, and TMA reads several heads at once; copy it.")
    box = BOX_COLUMNS, heads, box_rows // heads, 1, 1
    head_bytes = ALIGNMENT if shape[-2] == 1 else strides[-2] * itemsize
    row_bytes = ALIGNMENT if shape[-3] == 1 else strides[-3] * itemsize
    if len(shape) == 4:
        steps = shape[0] > 1 and strides[0] != 0
        sizes = shape[-1], shape[-2], shape[-3], shape[0] if steps else 1, 1
        return Geometry(sizes, (head_bytes, row_bytes, strides[0] * itemsize if steps else ALIGNMENT, ALIGNMENT), box, 1, steps)
    sizes = shape[-1], shape[-2], _RAGGED_ROWS, _RAGGED_EXTENT, _RAGGED_EXTENT
    return Geometry(sizes, (head_bytes, row_bytes, RAGGED_STRIDE_LIMIT - row_bytes, row_bytes), box, 1, 0)


class PageGeometry(NamedTuple):
    """A tensor map of a pool of pages but for its pointer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def page_geometry(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, page_rows: int) -> PageGeometry:
    """Returns how TMA reads blocks of ``page_rows`` rows of a pool of pages, (pages, rows of a page, heads, columns) with strides
    in elements: all columns of a block as one box, in panels as wide as a swizzle that divides a row (tile/paged_tile.cuh)."""
    columns = shape[3]
    panel = next(bytes_ // itemsize for bytes_ in (128, 64, 32) if columns * itemsize % bytes_ == 0)

    def stride(axis: int) -> int:
        return ALIGNMENT if shape[axis] == 1 else strides[axis] * itemsize

    sizes = panel, shape[1], columns // panel, shape[2], shape[0]
    return PageGeometry(sizes, (stride(1), panel * itemsize, stride(2), stride(0)), (panel, page_rows, columns // panel, 1, 1))


class PageRowsGeometry(NamedTuple):
    """A tensor map of a pool of pages in runs of rows but for its pointer, the factor on the head (0 where the stride is 0), and
    the steps of the map's last dimension from one page to the next, and from one row to the next."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    head_step: int
    page_steps: int
    row_steps: int


def page_rows_geometry(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, box_rows: int
) -> PageRowsGeometry:
    """Returns how TMA reads runs of rows of a pool of pages, (pages, rows of a page, heads, columns) with strides in elements,
    whose ends differ from page to page (tile/page_rows.cuh). Raises ProblemError where the pool is too large for it."""
    pages, rows, heads, columns = shape
    page_bytes = 0 if pages == 1 else strides[0] * itemsize
    row_bytes = ALIGNMENT if rows == 1 else strides[1] * itemsize
    has_heads = heads > 1 and strides[2] != 0
    step = math.gcd(page_bytes, row_bytes)
    page_steps, row_steps = page_bytes // step, row_bytes // step
    if row_bytes >= RAGGED_STRIDE_LIMIT or (pages - 1) * page_steps + rows * row_steps >= _RAGGED_EXTENT:
        layout = f"{name} has {pages} pages {page_bytes} bytes apart, of {rows} rows {row_bytes} bytes apart"
        raise ProblemError(f"{layout}; TMA counts up to {_RAGGED_EXTENT} steps of {step} bytes, which divide both.")
    sizes = columns, _RAGGED_ROWS, heads if has_heads else 1, _RAGGED_EXTENT, _RAGGED_EXTENT
    map_strides = row_bytes, strides[2] * itemsize if has_heads else ALIGNMENT, RAGGED_STRIDE_LIMIT - row_bytes, step
    return PageRowsGeometry(sizes, map_strides, (BOX_COLUMNS, box_rows, 1, 1, 1), int(has_heads), page_steps, row_steps)


class PageBoxesGeometry(NamedTuple):
    """A tensor map of a pool of small pages but for its pointer, and the steps of the map's last dimension from one page to the
    next, and from one head to the next (0 where the stride is 0)."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    page_steps: int
    head_steps: int


def page_boxes_geometry(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> PageBoxesGeometry:
    """Returns how TMA reads a pool of small pages, (pages, rows of a page, heads, columns) with strides in elements: a page of a
    head as one box, eight rows of all panels and then the next eight (tile/page_boxes.cuh). Rows are a multiple of 8, columns of
    64. Raises ProblemError where the pool is too large for it."""
    pages, rows, heads, columns = shape
    page_bytes, head_bytes = (0 if shape[axis] == 1 else strides[axis] * itemsize for axis in (0, 2))
    step, row_bytes = math.gcd(page_bytes, head_bytes) or ALIGNMENT, strides[1] * itemsize
    page_steps, head_steps = page_bytes // step, head_bytes // step
    extent = (pages - 1) * page_steps + (heads - 1) * head_steps + 1
    if extent > _RAGGED_EXTENT:
        layout = f"{name} has {pages} pages {page_bytes} bytes apart, of {heads} heads {head_bytes} bytes apart"
        raise ProblemError(f"{layout}; TMA counts up to {_RAGGED_EXTENT} steps of {step} bytes, which divide both.")
    box = BOX_COLUMNS, SWIZZLE_ROWS, columns // BOX_COLUMNS, rows // SWIZZLE_ROWS, 1
    map_strides = row_bytes, BOX_COLUMNS * itemsize, SWIZZLE_ROWS * row_bytes, step
    return PageBoxesGeometry((*box[:4], extent), map_strides, box, page_steps, head_steps)
