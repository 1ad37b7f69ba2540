"""This module says what the numbers of a cache in eight bits are multiplied by."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import AxisStride, Field, Fields, Pointer


@dataclasses.dataclass(frozen=True)
class CacheScale(Option):
    """A number, ``name``: "k_scale" or "v_scale"."""

    name: str
    source: ClassVar[str] = "variant/scale/cache_scale.cuh"

    @property
    def cuda_type(self) -> str:
        return f"CacheScale<&Args::{self.name}>"

    @property
    def fields(self) -> Fields:
        return (Field(self.name, "float"),)


@dataclasses.dataclass(frozen=True)
class CacheScales(CacheScale):
    """An array of them, (batch, kv_heads)."""

    @property
    def cuda_type(self) -> str:
        return f"CacheScales<{', '.join(f'&Args::{field.name}' for field in self.fields)}>"

    @property
    def fields(self) -> Fields:
        steps = (Field(f"{self.name}_{axis}", "i64", AxisStride(self.name, i)) for i, axis in enumerate(("batch", "head")))
        return (Field(self.name, "const float*", Pointer(self.name)), *steps)


def scales(k_scales: bool, v_scales: bool) -> tuple[CacheScale, CacheScale]:
    """Those of keys and of values, which are arrays or numbers."""
    k, v = ((CacheScales if is_array else CacheScale)(name) for name, is_array in (("k_scale", k_scales), ("v_scale", v_scales)))
    return k, v
