"""This module says how rows are rotated, and by which positions."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from . import Option, Wrapper
from .field import Field, Fields, Pointer, Stride


@dataclasses.dataclass(frozen=True)
class NoRotary(Option):
    """Not at all."""

    type: ClassVar[str] = "NoRotary"
    source: ClassVar[str] = "variant/rotary/none.cuh"


@dataclasses.dataclass(frozen=True)
class KeyPositions(Wrapper):
    """A row's position is its place among the keys of its sequence, whose lengths the base knows."""

    type: ClassVar[str] = "KeyPositions"
    source: ClassVar[str] = "variant/append/positions_keys.cuh"


@dataclasses.dataclass(frozen=True)
class GivenPositions(Option):
    """positions hold it."""

    type: ClassVar[str] = "GivenPositions"
    source: ClassVar[str] = "variant/append/positions_given.cuh"

    @property
    def fields(self) -> Fields:
        return (Field("positions", "const i64*", Pointer("positions")),)


@dataclasses.dataclass(frozen=True)
class RotaryPairs(Option):
    """Pairs of the first ``rotary_dim`` columns are rotated: i and i + rotary_dim / 2, or with ``interleaved`` 2 i and 2 i + 1.
    ``angle`` is the C++ type of cosines and sines, "Number" or "Element"."""

    positions: Option
    rotary_dim: int
    interleaved: bool = False
    angle: str = "Number"
    type: ClassVar[str] = "Rotary"

    @property
    def cuda_type(self) -> str:
        return f"{'Interleaved' if self.interleaved else 'Neox'}<{self.angle}, {self.positions.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.positions.sources, f"variant/rotary/{'interleaved' if self.interleaved else 'neox'}.cuh")

    @property
    def constants(self) -> dict[str, int]:
        return {"rotary_dim": self.rotary_dim}

    @property
    def fields(self) -> Fields:
        found = [Field(name, f"const {self.angle}*", Pointer(name)) for name in ("cos", "sin")]
        found += [Field(f"{name}_stride", "i64", Stride(name, "line")) for name in ("cos", "sin")]
        return (*found, Field("max_positions", "i64"), *self.positions.fields)
