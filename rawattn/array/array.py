"""An array of any library, seen as (pointer, shape, strides, element), and the names of elements."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

CPU = -1  # as a device
META = -2  # torch's device without memory; it is in descriptions alone
FLOATS = {  # numpy's types of the formats that kernels read
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
ELEMENTS = {np.dtype(dtype): name for name, dtype in FLOATS.items()} | {
    np.dtype(name): name for name in ("int32", "int64", "uint8", "int8", "int16", "bool")
}
DTYPES = {name: dtype for dtype, name in ELEMENTS.items()}


class Array(NamedTuple):
    """One array argument. The fields before ``pointer`` are what a plan binds."""

    library: str  # "torch", "cupy" or "numpy"
    device: int  # CUDA ordinal, or CPU
    dtype: str  # "bf16", "fp16", "fp32", "fp64", "e4m3", "e5m2", "int32" and other integers, "bool", or the library's own name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    pointer: int
    object: Any  # the torch tensor, CuPy or NumPy array: keeps the memory alive

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU

    def without_memory(self) -> Array:
        """The array without its object: it keeps no memory alive."""
        return self if self.object is None else self._replace(object=None)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous array, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The number of elements from an array's first one to its last in memory, of strides from 0 up."""
    return 1 + sum(map(operator.mul, shape, strides)) - sum(strides)


@functools.lru_cache(maxsize=1024)
def contiguous(shape: tuple[int, ...], dtype: str) -> Array:
    """Returns a contiguous array of this shape, as ``making.maker`` makes them, at no address."""
    return Array("", CPU, dtype, shape, contiguous_strides(shape), 0, None)
