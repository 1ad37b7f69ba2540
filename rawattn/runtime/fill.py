"""Fields of a kernel's arguments, and the bytes that arrays give them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

from ..array import tma
from ..array.array import DTYPES, Array
from ..driver import counters, tensor_map
from ..variant import field
from ..variant.element import KV_ELEMENTS

_AXES = {"batch": -4, "row": -3, "head": -2, "line": -2}
Place = tuple[str, int]  # what lies at an address, and the offset of the address in struct Args
SCRATCH = "scratch "  # before the name of a buffer, where it stands among operands


def is_tensor_map(fill: Any) -> bool:
    """Says whether a field begins with a tensor map."""
    is_page = isinstance(fill, field.PagePool) and fill.page_rows > 0
    return is_page or isinstance(fill, (field.TensorMap, field.PageRows, field.PageBoxes, field.PackedHeads))


def addresses_in(fill: Any) -> list[Place]:
    """The addresses in a field, but for those in a tensor map."""
    if isinstance(fill, field.Scratch):
        return [(SCRATCH + fill.name, 0)]
    if isinstance(fill, field.Parts):
        return [(f"{name}_{i}", 64 * i + at) for i in range(fill.number) for name, at in (("o", 0), ("lse", 8))]
    has_one = isinstance(fill, (field.Pointer, field.View, field.PagePool)) and not is_tensor_map(fill)
    return [(fill.operand, 0)] if has_one else []


def tensor_map_of(fill: Any, operands: Mapping[str, Array]) -> tuple[str, Callable[[int], bytes], bytes]:
    """The tensor map in a field: the array that it is of, the function that makes it for an address, and what follows it. That of
    an empty array, which is never read, is of another array, as it must be of something."""
    name, array, rest = fill.operand, operands[fill.operand], bytes(8)
    if 0 in array.shape:
        name, other = next((name, x) for name, x in operands.items() if x.dtype == array.dtype and 0 not in x.shape)
        rows = tma.SWIZZLE_ROWS if isinstance(fill, field.PageBoxes) else 1
        flat = other._replace(shape=(1, rows, 1, other.shape[-1]), strides=(0, other.shape[-1], 0, 1))
        array = flat if isinstance(fill, (field.PageRows, field.PageBoxes)) else other
    size, l2_bytes = KV_ELEMENTS[array.dtype].itemsize, tensor_map.L2_BYTES
    shape: Any
    if isinstance(fill, field.TensorMap):
        lies = array.shape, array.strides
        if fill.axes and name == fill.operand:
            lies = fill.axes.view(*lies, operands[fill.rows_of].shape[-3] if fill.rows_of else None)
        shape = tma.geometry(*lies, size, fill.box_rows)
        rest = struct.pack("<2i", shape.head_step, shape.batch_step)
    elif isinstance(fill, field.PageRows):
        shape = tma.page_rows_geometry(fill.operand, array.shape, array.strides, size, fill.box_rows)
        if name == fill.operand:
            rest = struct.pack("<4i", array.shape[0], shape.head_step, shape.page_steps, shape.row_steps)
    elif isinstance(fill, field.PageBoxes):
        shape = tma.page_boxes_geometry(fill.operand, array.shape, array.strides, size)
        if name == fill.operand:
            rest = struct.pack("<3i", array.shape[0], shape.page_steps, shape.head_steps)
    elif isinstance(fill, field.PagePool):
        shape, l2_bytes = tma.page_geometry(array.shape, array.strides, size, fill.page_rows), 64
        rest = struct.pack("<i", array.shape[0])
    else:
        shape = tma.heads_geometry(fill.operand, array.shape, array.strides, size, fill.heads, fill.box_rows)
        rest = struct.pack("<2i", fill.heads, shape.batch_step)
    return name, tensor_map.tensor_maps(array.dtype, shape.sizes, shape.strides, shape.box, l2_bytes), rest


def value_of(fill: Any, array: Array) -> int | bytes:
    """The value of a field from an array: a length, a stride, or strides in bytes behind the room for an address; packed
    sequences have no batch stride."""
    if type(fill) is field.Stride:
        axis = _AXES[fill.axis]
        return array.strides[axis] if -axis <= len(array.strides) else 0
    if type(fill) is field.Dim:
        return array.shape[fill.axis]
    if type(fill) is field.AxisStride:
        return array.strides[fill.axis]
    size = DTYPES[array.dtype].itemsize
    if type(fill) is field.PagePool:
        pages, steps = (array.shape[0], array.strides[:3]) if len(array.shape) == 4 else (1, (0, *array.strides[:2]))  # or packed
        return struct.pack("<5q", 0, *[stride * size for stride in steps], pages)
    strides = fill.axes.view(array.shape, array.strides)[1] if fill.axes else array.strides
    batch = strides[-4] if len(strides) == 4 else 0
    return struct.pack("<4q", 0, batch * size, strides[-3] * size, strides[-2] * size)


def value_from(fill: Any, inputs: Mapping[str, Array], device: int) -> int | bytes:
    """The value of a field from inputs, by name, on a device; 0, or nothing, from an input that is not given."""
    if type(fill) is field.Violations:
        return counters.violations(device)
    if type(fill) is field.Parts:
        return b"".join([_pack_part(inputs[f"o_{i}"], inputs[f"lse_{i}"]) for i in range(fill.number)])
    array = inputs.get(fill.operand)
    return value_of(fill, array) if array is not None else b"" if type(fill) is field.View else 0


def _pack_part(o: Array, lse: Array) -> bytes:
    """A Part: room for two addresses, and the strides of o and lse from batch to batch, row to row and head to head."""
    batch = (o.strides[0], lse.strides[0]) if len(o.shape) == 4 else (0, 0)
    return struct.pack("<16x6q", batch[0], o.strides[-3], o.strides[-2], batch[1], lse.strides[-1], lse.strides[-2])
