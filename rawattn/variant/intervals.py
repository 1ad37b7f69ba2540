"""Masks whose queries keep one run of keys each, which a launch before finds (``cuda_src/intervals.cu``)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np

from ..trace import cuda_text
from ..trace.evaluation import evaluate
from ..trace.interval import interval_of
from . import Option
from .field import Field, Fields, Scratch
from .function import FunctionMask

ROWS, BLOCKS, QUERIES, SCANNED = (f"interval_{name}" for name in ("rows", "blocks", "queries", "scanned"))
COUNTS = ("interval_q_all", "interval_kv_all", "interval_q_blocks", "interval_kv_blocks")  # blocks of a head, and of a sequence
FIELDS: Fields = (
    *(Field(name, "void*", Scratch(name)) for name in (ROWS, BLOCKS, QUERIES)),
    *(Field(name, "i32") for name in COUNTS),
)


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class IntervalMask(FunctionMask):
    """A mask that is a Python function whose queries keep one run of keys each, by elements of their own."""

    type: ClassVar[str] = "Intervals"
    lists: ClassVar[bool] = False
    by_blocks: ClassVar[bool] = False
    column_bytes: ClassVar[int] = 0

    @property
    def differs_by_head(self) -> bool:
        """Says whether heads keep other keys."""
        interval = interval_of(self.code)
        return interval is not None and "h" in interval.deps

    @property
    def cuda_type(self) -> str:
        return "IntervalsOfHead" if self.differs_by_head else "Intervals"

    @property
    def sources(self) -> tuple[str, ...]:
        return ("variant/mask/intervals.cuh",)

    @property
    def texts(self) -> dict[str, str]:
        return {}

    @property
    def fields(self) -> Fields:
        return FIELDS

    @property
    def _written(self) -> cuda_text.Written:
        return cuda_text.bounds(self.code, self.checked, self.q_below)

    def bounds_of(
        self, arrays: Any, b: int, h: int, q: Any, q_len: int, kv_len: int, q_start: int = 0, kv_start: int = 0
    ) -> tuple[Any, Any]:  # fmt: skip
        """First and one past the last key that queries of a sequence keep, of NumPy arrays."""
        at = {"b": b, "h": h, "q": q, "q_len": q_len, "kv_len": kv_len, "q_start": q_start, "kv_start": kv_start}
        interval = interval_of(self.code)
        assert interval is not None

        def value(x: Any) -> Any:
            return np.broadcast_to(evaluate(x, at, arrays, self.numbers, np, np.float32), q.shape)

        first = np.zeros_like(q) if interval.first is None else value(interval.first).astype(np.int64)
        end = np.full_like(q, kv_len) if interval.last is None else value(interval.last).astype(np.int64) + 1
        return np.clip(first, 0, kv_len), np.where(value(interval.keeps), np.clip(end, 0, kv_len), 0)

    @functools.cached_property
    def bounds(self) -> FunctionBounds:
        """The option of the launch before."""
        return FunctionBounds(self)


@dataclasses.dataclass(frozen=True)
class FunctionBounds(Option):
    """The keys that each query keeps, of such a mask."""

    mask: IntervalMask
    source: ClassVar[str] = "function/bounds.cuh"

    @property
    def texts(self) -> dict[str, str]:
        return {self.source: self.mask._written.text}

    @property
    def kind(self) -> tuple[object, ...]:
        return (self.cuda_type, *self.mask.kind)

    @property
    def fields(self) -> Fields:
        return self.mask.filled(self.mask._written)

    @property
    def values(self) -> dict[str, Any]:
        return self.mask.values


def is_interval(option: Any) -> bool:
    """Says whether a launch before finds which keys the option's queries keep."""
    return isinstance(option, IntervalMask)


def differs_by_head(mask: Any) -> bool:
    """Says whether heads keep other keys."""
    return mask.of_head is not None or (is_interval(mask) and mask.differs_by_head)


def by_intervals(mask: Any) -> Any:
    """The mask as one of intervals, where its function says so by elements of each query; itself else. What bounds kv by sizes
    and numbers alone stays a list, or is a built-in mask."""
    if type(mask) is not FunctionMask:
        return mask
    interval = interval_of(mask.code)
    if interval is None or not interval.reads_queries:
        return mask
    arrays = tuple(array._replace(pyramid=0) for array in mask.arrays)
    return IntervalMask(mask.code, mask.numbers, arrays, mask.checked, mask.q_below)
