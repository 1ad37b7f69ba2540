"""Arrays of one library as those of another: NumPy's views and copies on the host, and results for a caller."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from .array import DTYPES, Array
from .reading import read


def to_library(result: Any, original: Any) -> Any:
    """``result`` (torch, CuPy or NumPy) as an array of the library that ``original`` came from."""
    if isinstance(original, type(result)):
        return result
    root = type(original).__module__.partition(".")[0]
    if root == "numba":
        return sys.modules["numba"].cuda.as_cuda_array(result)
    if root == "torch":
        return result
    if hasattr(original, "__array_namespace__"):
        return original.__array_namespace__().from_dlpack(result)
    module = sys.modules.get(root)
    for home in (module, getattr(module, "dlpack", None)):
        if home is not None and hasattr(home, "from_dlpack"):
            return home.from_dlpack(result)
    return result


def on_host(x: Any) -> npt.NDArray[Any]:
    """An array of any library in NumPy: a view of one on the CPU, a copy of one on a GPU."""
    array = x if isinstance(x, Array) else read(x, "array")
    if array.is_cpu:
        return as_numpy(array)
    if array.library == "torch":
        return as_numpy(read(array.object.detach().cpu(), "array"))
    copy: npt.NDArray[Any] = array.object.get()
    return copy


def as_numpy(array: Array) -> npt.NDArray[Any]:
    """An array on the CPU in NumPy: itself if it is NumPy's, else ``view``."""
    x: npt.NDArray[Any] = array.object if array.library == "numpy" else view(array)
    return x


def view(array: Array) -> npt.NDArray[Any]:
    """A NumPy view of an array on the CPU, at its address. It keeps the memory alive if the array has its object."""
    return np.asarray(Memory(array)).view(DTYPES[array.dtype])


class Memory:
    """The bytes of an array's elements, as NumPy takes them. ``Tensor.numpy`` would forbid for good that the storage is freed and
    filled again, which FSDP does with parameters."""

    def __init__(self, array: Array) -> None:
        size = DTYPES[array.dtype].itemsize
        place = {"data": (array.pointer, False), "shape": tuple(array.shape), "strides": tuple(s * size for s in array.strides)}
        self.tensor, self.__array_interface__ = array.object, {"version": 3, "typestr": f"|V{size}", **place}
