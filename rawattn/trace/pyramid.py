"""Minima and maxima of an array over blocks of its elements, which bound what is loaded by a range of indices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .ranges import Range, anything, exactly, hull

BASE, MOST = 16, 12  # elements of a block along an axis, at the lowest level; blocks that a query reads along an axis, at most


class Pyramid:
    """The minima and maxima over blocks of 16 elements of the last axis, or of 16 x 16 of the last two, of 32, 64, and so on to
    one block. A block with NaN has NaN for both."""

    def __init__(self, array: Any, axes: int) -> None:
        self.array, self.axes = np.asarray(array), axes
        self.levels = [self._reduce(self.array, self.array, BASE)]
        while max(self.levels[-1][0].shape[-axes:]) > 1:
            self.levels.append(self._reduce(*self.levels[-1], 2))

    def _reduce(self, low: Any, high: Any, size: int) -> tuple[Any, Any]:
        for axis in range(-self.axes, 0):
            starts = np.arange(0, low.shape[axis], size)
            low, high = np.minimum.reduceat(low, starts, axis), np.maximum.reduceat(high, starts, axis)
        return low, high

    def query(self, prefix: tuple[Any, ...], box: Sequence[Range], kind: str) -> Range:
        """The bounds of the elements in boxes of the last axes, at the indices ``prefix`` of those before."""
        ends = np.broadcast_arrays(*(x for r in box for x in (r.lo, r.hi)), *prefix)
        first, last = [x // BASE for x in ends[0 : 2 * self.axes : 2]], [x // BASE for x in ends[1 : 2 * self.axes : 2]]
        level = np.zeros(ends[0].shape, np.int64)
        while (many := functools.reduce(np.logical_or, [b - a >= MOST for a, b in zip(first, last, strict=True)])).any():
            first, last = ([np.where(many, x // 2, x) for x in side] for side in (first, last))
            level = level + many
        low, high = (np.empty(level.shape, self.array.dtype) for _ in range(2))
        for number in np.unique(level):
            at = np.nonzero(level == number)
            here = tuple(np.broadcast_to(x, level.shape)[at] for x in prefix)
            starts, ends_ = [x[at] for x in first], [x[at] for x in last]
            spans = [int((b - a).max()) + 1 for a, b in zip(starts, ends_, strict=True)]
            blocks = [
                tuple(np.minimum(a + o, b) for a, b, o in zip(starts, ends_, offset, strict=True))
                for offset in np.ndindex(*spans)
            ]
            for out, side, f in ((low, 0, np.minimum), (high, 1, np.maximum)):
                out[at] = functools.reduce(f, [self.levels[number][side][here + block] for block in blocks])
        return _join_ends(low, high, kind)

    def flat(self) -> Any:
        """The pyramid as a kernel reads it: of each row or matrix all minima, level after level, then all maxima."""
        rows = self.array.shape[: self.array.ndim - self.axes]
        return np.concatenate([level[side].reshape(*rows, -1) for side in (0, 1) for level in self.levels], -1)


def _join_ends(low: Any, high: Any, kind: str) -> Range:
    lo, hi = exactly(low, kind), exactly(high, kind)
    if kind != "float":
        return Range(lo.lo, hi.lo)
    nan = lo.nan | hi.nan
    return Range(np.where(nan, -np.inf, lo.lo), np.where(nan, np.inf, hi.hi), nan)


def range_of_load(array: Any, kind: str, indices: Sequence[Range], pyramid: Callable[[int], Pyramid]) -> Range:
    """The bounds of the elements at ``indices``: exact for single elements and small boxes, else by the pyramid of the last axes,
    else those of any number."""
    array = np.asarray(array)
    clipped = [Range(np.clip(i.lo, 0, n - 1), np.clip(i.hi, 0, n - 1)) for i, n in zip(indices, array.shape, strict=True)]
    wide = [axis for axis, i in enumerate(clipped) if not np.all(i.point)]
    exact = exactly(array[tuple(i.lo for i in clipped)], kind)
    if not wide:
        return exact
    spans = [int(np.max(i.hi - i.lo)) + 1 for i in clipped]
    if math.prod(spans) <= BASE:
        boxes = [tuple(np.minimum(i.lo + o, i.hi) for i, o in zip(clipped, offset, strict=True)) for offset in np.ndindex(*spans)]
        return hull(*(exactly(array[box], kind) for box in boxes))
    if array.ndim - wide[0] > 2:
        return anything(kind)
    axes = array.ndim - wide[0]
    bounds_of_blocks = pyramid(axes).query(tuple(i.lo for i in clipped[:-axes]), clipped[-axes:], kind)
    point = functools.reduce(np.logical_and, [i.point for i in clipped])
    parts = ((exact.lo, bounds_of_blocks.lo), (exact.hi, bounds_of_blocks.hi), (exact.nan, bounds_of_blocks.nan))
    return Range(*(np.where(point, x, y) for x, y in parts))
