"""What can be read 16 bytes at a time, by the tensor copy engine (TMA) or by threads, as functions of shape, strides and pointer.

The driver checks what TMA needs when it makes a tensor map, but only on a machine that has one, and it gives no reason.
https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 16  # bytes, of pointers and strides
STRIDE_LIMIT = 1 << 40  # bytes
ROW_LIMIT = 1 << 32  # bytes
BOX_COLUMNS = 64  # one 128-byte swizzle span of a 16-bit format
_RAGGED = 1 << 30, (1 << 31) - 1, 1 << 34  # rows, extent of the two shifting dimensions, bytes that wrap: see rows/varlen.cuh


class Geometry(NamedTuple):
    """A tensor map but for its pointer, and the factors on the head and batch coordinates (0 where the stride is 0)."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    head_step: int
    batch_step: int


def misfit(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, pointer: int = 0) -> str | None:
    """Why the copy engine cannot read the array ``name``, (batch, rows, heads, columns) or (rows, heads, columns), with strides in
    elements; None where it can."""
    if 0 in shape:
        return None
    if pointer % ALIGNMENT:
        return f"{name} begins at an address that is not a multiple of {ALIGNMENT} bytes, which the copy engine needs{_fix(name)}"
    axes = ("batch", "row", "head")[-(len(shape) - 1) :]
    for axis, size, stride in zip(axes, shape, strides, strict=False):
        bytes_ = stride * itemsize
        if size == 1 or (stride == 0 and axis != "row"):
            continue
        if bytes_ % ALIGNMENT or not 0 < bytes_ < STRIDE_LIMIT:
            need = f"a positive multiple of {ALIGNMENT} bytes below 2^40"
            return f"{name} has a {axis} stride of {bytes_} bytes, but the copy engine needs {need}{_fix(name)}"
    return None


def misaligned(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, pointer: int = 0) -> str | None:
    """Why threads cannot copy the rows of an array, as in ``misfit``, 16 bytes at a time; None where they can."""
    if 0 in shape:
        return None
    aligned = all(s * itemsize % ALIGNMENT == 0 for n, s in zip(shape[:-1], strides, strict=False) if n > 1)
    if pointer % ALIGNMENT or not aligned:
        return f"{name} has an address or strides that are not multiples of {ALIGNMENT} bytes{_fix(name)}"
    if shape[-3] > 1 and not 0 <= strides[-3] * itemsize < ROW_LIMIT:
        return f"{name} has a row stride of {strides[-3] * itemsize} bytes; it must be from 0 to 2^32{_fix(name)}"
    return None


def _fix(name: str) -> str:
    return f"; give a copy with aligned rows, such as {name}.contiguous() in torch or cupy.ascontiguousarray({name})"


def geometry(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, box_rows: int) -> Geometry:
    """How the copy engine reads a (batch, rows, heads, columns) or packed (rows, heads, columns) array that fits it."""

    def plain(axis: int) -> tuple[int, int, int]:  # size, stride in bytes, step
        if shape[axis] == 1 or strides[axis] == 0:
            return 1, ALIGNMENT, 0
        return shape[axis], strides[axis] * itemsize, 1

    columns, (heads, head_bytes, head_step) = shape[-1], plain(-2)
    rows, row_bytes, _ = plain(-3)
    if len(shape) == 4:
        batch, batch_bytes, batch_step = plain(0)
        sizes, steps = (columns, rows, heads, batch), (row_bytes, head_bytes, batch_bytes)
        return Geometry(sizes, steps, (BOX_COLUMNS, box_rows, 1, 1), head_step, batch_step)
    bound, extent, wrap = _RAGGED
    sizes, steps = (columns, bound, heads, extent, extent), (row_bytes, head_bytes, wrap - row_bytes, row_bytes)
    return Geometry(sizes, steps, (BOX_COLUMNS, box_rows, 1, 1, 1), head_step, 0)
