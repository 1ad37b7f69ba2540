"""What leaves a block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Fields, Option


@dataclasses.dataclass(frozen=True)
class StoreO(Option):
    """The output rows."""

    type: ClassVar[str] = "StoreO"
    source: ClassVar[str] = "variant/store/o.cuh"

    @property
    def fields(self) -> Fields:
        return (("o", "Element*"), ("o_stride_batch", "i64"), ("o_stride_row", "i64"), ("o_stride_head", "i64"))


@dataclasses.dataclass(frozen=True)
class StoreOLse(StoreO):
    """The output rows and the logarithm of each row's sum of exponentials."""

    type: ClassVar[str] = "StoreOLse"
    source: ClassVar[str] = "variant/store/o_lse.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, ("lse", "Number*"))


@dataclasses.dataclass(frozen=True)
class StorePartial(Option):
    """The result over one split of the keys, in scratch: ``o_partial`` (splits, rows, columns) and ``lse_partial`` (splits,
    rows), float32 or, of fp64, float64. ``partial_rows`` are the rows of all heads and batches, in the order of lse."""

    type: ClassVar[str] = "StorePartial"
    source: ClassVar[str] = "variant/store/partial.cuh"

    @property
    def fields(self) -> Fields:
        return (("o_partial", "Number*"), ("lse_partial", "Number*"), ("partial_rows", "i64"))
