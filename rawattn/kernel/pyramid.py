"""pyramid.cu: minima and maxima of blocks of the arrays that a mask captured, before the kernels that ask the mask for tiles."""

from __future__ import annotations

import functools
import math
from typing import Any

from ..compile.compiler import Source
from ..driver.device import Device
from ..errors import UnsupportedError
from ..variant import Option
from ..variant.element import FP32, Item
from ..variant.field import AxisStride, Counter, Field, Fields, Pointer, Scratch
from ..variant.scheduler import launch_of
from .program import Buffer, Launch, Program
from .render import config_header, source

NAME, FILE = "pyramid", "pyramid.cu"
BLOCK = 16  # elements of a block along an axis
OUTER = 4  # axes before those of which blocks are made, at most
SIDES = {1: (1, 256), 2: (16, 16)}  # blocks of a level that a thread block has, by the axes of which they are


def levels(shape: tuple[int, ...], axes: int) -> list[tuple[int, int]]:
    """Rows and columns of the blocks on each level over a row (1 axis) or a matrix (2)."""
    sizes = [(-(-shape[-2] // BLOCK) if axes == 2 else 1, -(-shape[-1] // BLOCK))]
    while sizes[-1] != (1, 1):
        sizes.append(((sizes[-1][0] + 1) // 2, (sizes[-1][1] + 1) // 2))
    return sizes


def numbers(shape: tuple[int, ...], axes: int) -> tuple[int, int]:
    """The number of rows or matrices that an array has, and the number of thread blocks that each of them takes."""
    lowest, side = levels(shape, axes)[0], SIDES[axes]
    return math.prod(shape[:-axes]), -(-lowest[0] // side[0]) * -(-lowest[1] // side[1])


@functools.lru_cache(maxsize=1024)
def buffer(array: Any) -> Buffer:
    """The scratch memory of the pyramids of a captured array."""
    blocks = sum(rows * columns for rows, columns in levels(array.shape, array.pyramid))
    return Buffer(f"{array.name}_pyramid", 2 * blocks * numbers(array.shape, array.pyramid)[0] * Item(array.element).bytes)


def fields(array: Any) -> Fields:
    """The fields of struct Args, in order."""
    name, outer, rank = array.name, len(array.shape) - array.pyramid, len(array.shape)
    args = [Field("array", "const void*", Pointer(name)), Field("pyramid", "void*", Scratch(f"{name}_pyramid"))]
    counters = 1 << (max(1, numbers(array.shape, array.pyramid)[0]) - 1).bit_length()  # few sizes: each is kept for a device
    args += [Field("counter", "i32*", Counter(4 * max(2, counters)))]
    for i in range(OUTER):
        axis = outer - OUTER + i
        args.append(Field(f"stride_{i}", "i64", AxisStride(name, axis)) if axis >= 0 else Field(f"stride_{i}", "i64"))
    rows = Field("row_stride", "i64", AxisStride(name, rank - 2)) if array.pyramid == 2 else Field("row_stride", "i64")
    args += [rows, Field("column_stride", "i64", AxisStride(name, rank - 1))]
    return (*args, *(Field(f"size_{i}", "i32") for i in range(OUTER)), *(Field(x, "i32") for x in ("rows", "columns", "blocks")))


@functools.lru_cache(maxsize=256)
def render(element: str, axes: int, arch: str, ctypes: Fields) -> Source:
    """The source for arrays of one format."""
    options: dict[str, Option] = {"Element": FP32, "Item": Item(element), "Launch": launch_of(arch)}
    return source(FILE, config_header({"axes": axes}, ctypes, [], options), arch)


@functools.lru_cache(maxsize=1024)
def launch(array: Any, device: Device) -> Launch:
    """The launch for one captured array."""
    axes, shape = array.pyramid, array.shape
    if len(shape) - axes > OUTER:
        raise UnsupportedError(f"{array.name} has {len(shape)} axes; a mask takes arrays of up to {OUTER + axes} axes here.")
    outer = (*(1,) * (OUTER - len(shape) + axes), *shape[:-axes])
    count, blocks = numbers(shape, axes)
    values: dict[str, float] = {f"size_{i}": size for i, size in enumerate(outer)}
    values |= {f"stride_{i}": 0 for i in range(OUTER)} | {"row_stride": 0}
    values |= {"rows": shape[-2] if axes == 2 else 1, "columns": shape[-1], "blocks": blocks}
    args = fields(array)
    text = render(array.element, axes, device.arch, tuple(Field(*field[:2]) for field in args))
    return Launch(NAME, text, args, values, count * blocks)


def before(program: Program, mask: Any, device: Device) -> Program:
    """The program, after the launches that make the pyramids that a mask asks for."""
    arrays = [array for array in mask.arrays if array.pyramid and math.prod(array.shape)]
    if not arrays or not program.launches:
        return program
    return Program((*(launch(array, device) for array in arrays), *program.launches), (*map(buffer, arrays), *program.scratch))
