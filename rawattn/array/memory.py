"""This module says whether arrays share memory, as far as addresses tell."""

from __future__ import annotations

from typing import Any

import numpy as np

from .array import DTYPES, Array
from .conversion import Memory

_WORK: Any = 1 << 20  # candidates that are tried, at most a fraction of a second; NumPy's type stubs know only -1 and 0


def extent(array: Array) -> tuple[int, int]:
    """Addresses from the first byte of an array's elements to behind the last."""
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    size = DTYPES[array.dtype].itemsize
    return array.pointer + size * sum(min(s, 0) for s in steps), array.pointer + size * (1 + sum(max(s, 0) for s in steps))


def overlap(a: Array, b: Array) -> bool:
    """Says whether an element of ``a`` and one of ``b`` share memory; with ``a is b``, whether two elements of it do."""
    if 0 in a.shape or 0 in b.shape:
        return False
    if a is b:
        return _overlaps_itself(a)
    (a_begin, a_end), (b_begin, b_end) = extent(a), extent(b)
    if a_end <= b_begin or b_end <= a_begin:
        return False
    try:
        return bool(np.shares_memory(np.asarray(Memory(a)), np.asarray(Memory(b)), max_work=_WORK))
    except np.exceptions.TooHardError:
        return True


def _overlaps_itself(array: Array) -> bool:
    reach = 0  # elements that the dimensions so far span, from the smallest stride up
    for stride, size in sorted((abs(s), n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
