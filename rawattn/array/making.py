"""This module makes arrays in the library and on the device of another: outputs, scratch memory, copies that kernels can read."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from . import torch_state
from .array import DTYPES, Array, contiguous, contiguous_strides
from .reading import read


def maker(original: Array, shape: tuple[int, ...], dtype: str) -> Callable[[Any], Any]:
    """A function that makes new, contiguous arrays beside the array that it gets, in ``original``'s library and on its device."""
    if original.library == "torch":
        torch, torch_dtype = sys.modules["torch"], torch_state.dtypes[dtype]
        if original.dtype == dtype and original.shape == shape and tuple(original.strides) == contiguous(shape, dtype).strides:
            return torch.empty_like  # takes half as long as torch.empty
        if original.dtype == dtype:
            return operator.methodcaller("new_empty", shape)  # to name the dtype takes half as long again
        return lambda beside: beside.new_empty(shape, dtype=torch_dtype)
    if original.library == "cupy":
        return lambda beside: _make_on_cupy(original.device, shape, DTYPES[dtype])
    return lambda beside: np.empty(shape, DTYPES[dtype])


def _make_on_cupy(device: int, shape: tuple[int, ...], dtype: Any) -> Any:
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(device):
        return cupy.empty(shape, dtype)


def scratch_maker(original: Array, size: int) -> Callable[[Any], Any]:
    """A function that makes an array of ``size`` bytes or a few more, of ``original``'s dtype, as those of ``maker``."""
    return maker(original, (-(-size // DTYPES[original.dtype].itemsize),), original.dtype)


def one_int64(beside: Any, number: int) -> Any:
    """A new array of this number, (1,), in the library of ``beside``, a NumPy array or one of a GPU that CuPy can see."""
    original = read(beside, "q")
    if original.library == "numpy":
        return np.array([number], np.int64)
    with sys.modules["cupy"].cuda.Device(original.device):
        return sys.modules["cupy"].full((1,), number, np.int64)


def dense(x: Any, whole: bool = False) -> Any:
    """``x``, or a contiguous copy of a torch, CuPy or NumPy array of which a dimension is expanded (a stride of 0), or whose last
    dimension is not contiguous, or, ``whole``, any; on a GPU also of one whose rows do not begin at 16 bytes, where those of a
    copy do. Gradients come so from autograd; nothing else is ever copied."""
    root = type(x).__module__.partition(".")[0]
    if isinstance(x, torch_state.tensor) or root == "torch":
        try:
            if _is_sparse(x.shape, x.stride(), whole):
                return x.contiguous()
            is_apart = x.get_device() >= 0 and _begins_anywhere(x.shape, x.stride(), x.element_size(), x.data_ptr())
            return x.clone(memory_format=sys.modules["torch"].contiguous_format) if is_apart else x
        except (AttributeError, NotImplementedError, RuntimeError):  # no tensor with plain memory: ``read`` says so
            return x
    if root in ("numpy", "cupy") and hasattr(x, "strides"):
        strides = tuple(stride / x.dtype.itemsize for stride in x.strides)
        if _is_sparse(x.shape, strides, whole):
            return sys.modules[root].ascontiguousarray(x)
        return x.copy() if root == "cupy" and _begins_anywhere(x.shape, strides, x.dtype.itemsize, x.data.ptr) else x
    return x


def _begins_anywhere(shape: tuple[int, ...], strides: tuple[float, ...], itemsize: int, pointer: int) -> bool:
    """Says whether rows lie where the kernels of up to 32 bits cannot read them, and those of a copy would not."""
    if 0 in shape or itemsize > 4 or shape[-1] * itemsize % 16:
        return False
    rows = zip(shape[:-1], strides, strict=False)
    return bool(pointer % 16) or any(n > 1 and (stride * itemsize % 16 or stride < 0) for n, stride in rows)


def _is_sparse(shape: tuple[int, ...], strides: tuple[float, ...], whole: bool) -> bool:
    if 0 in shape or (not whole and strides[-1:] == (1,) and 0 not in strides):
        return False
    last, wanted = len(shape) - 1, contiguous_strides(shape)
    for i, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if n > 1 and (stride != wanted[i] if whole or i == last else stride == 0):
            return True
    return False
