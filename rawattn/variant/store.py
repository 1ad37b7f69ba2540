"""What leaves a block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Field, Fields, Pointer, Stride
from . import Option


@dataclasses.dataclass(frozen=True)
class StoreO(Option):
    """The output rows."""

    type: ClassVar[str] = "StoreO"
    source: ClassVar[str] = "variant/store/o.cuh"

    @property
    def fields(self) -> Fields:
        strides = [Field(f"o_stride_{axis}", "i64", Stride("o", axis)) for axis in ("batch", "row", "head")]
        return (Field("o", "Element*", Pointer("o")), *strides)


@dataclasses.dataclass(frozen=True)
class StoreOLse(StoreO):
    """The output rows and the logarithm of each row's sum of exponentials."""

    type: ClassVar[str] = "StoreOLse"
    source: ClassVar[str] = "variant/store/o_lse.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("lse", "Number*", Pointer("lse")))


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
