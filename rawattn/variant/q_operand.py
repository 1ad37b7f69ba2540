"""How q becomes an operand of products."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import AxisStride, Field, Fields, Pointer
from . import Option


@dataclasses.dataclass(frozen=True)
class PlainQ(Option):
    """It is one as it lies in memory."""

    type: ClassVar[str] = "PlainQ"
    source: ClassVar[str] = "variant/q_operand/plain.cuh"


@dataclasses.dataclass(frozen=True)
class ScaledQ(Option):
    """In half precision, each row times a power of two, for products with keys of eight bits."""

    type: ClassVar[str] = "ScaledQ"
    source: ClassVar[str] = "variant/q_operand/scaled.cuh"


@dataclasses.dataclass(frozen=True)
class KScaledQ(ScaledQ):
    """The same where an array has the scales of keys."""

    type: ClassVar[str] = "KScaledQ"
    source: ClassVar[str] = "variant/q_operand/k_scales.cuh"

    @property
    def fields(self) -> Fields:
        steps = [Field(f"k_scale_{axis}", "i64", AxisStride("k_scale", i)) for i, axis in enumerate(("batch", "head"))]
        return (Field("k_scale", "const float*", Pointer("k_scale")), *steps)
