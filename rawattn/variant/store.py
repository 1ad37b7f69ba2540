"""This module has what a block writes, and the results over different keys that ``combine.cu`` folds."""

from __future__ import annotations

from typing import ClassVar

from . import Option
from .field import Field, Fields, Pointer, Scratch, Stride


class StoreO(Option):
    """A block writes the output rows."""

    source: ClassVar[str] = "variant/store/o.cuh"

    @property
    def fields(self) -> Fields:
        strides = [Field(f"o_stride_{axis}", "i64", Stride("o", axis)) for axis in ("batch", "row", "head")]
        return (Field("o", "OElement*", Pointer("o")), *strides)


class StoreOLse(StoreO):
    """A block writes the output rows and the logarithm of each row's sum of exponentials."""

    source: ClassVar[str] = "variant/store/o_lse.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("lse", "Number*", Pointer("lse")))


class StorePartial(Option):
    """A block writes the result over a split of the keys: ``o_partial`` (splits, rows, head_dim_v) and ``lse_partial``
    (splits, rows), float32 or, of fp64, float64. ``partial_rows`` are the rows of all heads and batches, in the order of lse."""

    source: ClassVar[str] = "variant/store/partial.cuh"

    @property
    def fields(self) -> Fields:
        parts = [Field(name, "Number*", Scratch(name)) for name in ("o_partial", "lse_partial")]
        return (*parts, Field("partial_rows", "i64"))


MOST_ARRAYS = 16  # in a launch's arguments


class ScratchParts(Option):
    """The results that ``StorePartial`` left of ``splits`` splits."""

    source: ClassVar[str] = "variant/parts/scratch.cuh"

    @property
    def fields(self) -> Fields:
        return (*StorePartial().fields, Field("splits", "i32"))


class Arrays(Option):
    """Up to 16 pairs of o and lse, each with strides of its own: ``parts`` holds them, ``part_count`` says how many."""

    source: ClassVar[str] = "variant/parts/arrays.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("parts", "PartList"), Field("part_count", "i32"))


class SumAndArrays(Arrays):
    """Up to 16 pairs of o and lse, the first of which is a sum in the format that is computed in."""

    source: ClassVar[str] = "variant/parts/sum_and_arrays.cuh"
