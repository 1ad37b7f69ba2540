"""This module says how q becomes an operand of products."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..program import Fields
from . import Option


@dataclasses.dataclass(frozen=True)
class PlainQ(Option):
    """It is one as it lies in memory."""

    type: ClassVar[str] = "PlainQ"
    source: ClassVar[str] = "variant/q_operand/plain.cuh"


@dataclasses.dataclass(frozen=True)
class ScaledQ(Option):
    """In half precision, each row times a power of two, for products with keys of eight bits; ``k`` is what these are multiplied
    by."""

    k: Option
    type: ClassVar[str] = "ScaledQ"
    source: ClassVar[str] = "variant/q_operand/scaled.cuh"

    @property
    def cuda_type(self) -> str:
        return f"{self.type}<{self.k.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.k.sources, self.source)

    @property
    def fields(self) -> Fields:
        return self.k.fields
