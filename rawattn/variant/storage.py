"""This module says what a cache holds for a number."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option
from .field import Fields


@dataclasses.dataclass(frozen=True)
class SameStorage(Option):
    """The number, in its own format."""

    type: ClassVar[str] = "SameStorage"
    source: ClassVar[str] = "variant/append/storage_same.cuh"


@dataclasses.dataclass(frozen=True)
class QuantizedStorage(Option):
    """The number divided by the scale of keys, ``k``, or of values, ``v``, in another format."""

    k: Option
    v: Option
    type: ClassVar[str] = "QuantizedStorage"
    source: ClassVar[str] = "variant/append/storage_quantized.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.k.cuda_type}, {self.v.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.k.sources, *self.v.sources, self.source)

    @property
    def fields(self) -> Fields:
        return (*self.k.fields, *self.v.fields)
