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
class StoreOScalar(StoreO):
    """The output, number by number: it need not be aligned."""

    type: ClassVar[str] = "StoreOScalar"
    source: ClassVar[str] = "variant/store/o_scalar.cuh"


@dataclasses.dataclass(frozen=True)
class StoreOLseScalar(StoreOLse):
    """The same, and the logarithm of each row's sum of exponentials."""

    type: ClassVar[str] = "StoreOLseScalar"
    source: ClassVar[str] = "variant/store/o_lse_scalar.cuh"
