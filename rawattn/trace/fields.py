"""The contents of the fields that a function adds to struct Args: facts about its arrays, and values that the host makes of its
numbers."""

from __future__ import annotations

import dataclasses
import struct
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .evaluation import evaluate
from .expressions import Expr


class ArrayAddress(NamedTuple):
    """The address of a captured array."""

    number: int


class ArraySize(NamedTuple):
    """The length of a captured array along an axis."""

    number: int
    axis: int


class ArrayStride(NamedTuple):
    """The stride of a captured array along an axis, in elements."""

    number: int
    axis: int


class PyramidAddress(NamedTuple):
    """The address of a captured array's pyramid."""

    number: int


@dataclasses.dataclass(frozen=True, eq=False)
class HostValue:
    """A value that the host makes of captured numbers; ``dtype`` is that of floats."""

    of: Expr
    dtype: Any = np.float64

    def value(self, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> Any:
        """The field's value."""
        raise NotImplementedError


class Number(HostValue):
    """A number that the host makes of captured numbers."""

    def value(self, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> Any:
        """The number."""
        if (exact := _sum_exactly(self.of, shapes, numbers)) is not None:
            return exact
        with np.errstate(all="ignore"):
            value = evaluate(
                self.of, {}, [types.SimpleNamespace(shape=shape) for shape in shapes], numbers, dtype=self.dtype
            ).item()
        return int(value) if isinstance(value, bool) else value


def _sum_exactly(x: Expr, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> int | None:
    """The value of x if it is a sum of captured integers and of sizes, without NumPy, which takes longer; else None."""
    if x.op == "param" and x.type == "int":
        return int(numbers[x.args[0]])
    if x.op == "dim":
        return int(shapes[x.args[0]][x.args[1]])
    if x.op == "const" and x.type == "int":
        return int(x.args[0])
    if x.op != "lin":
        return None
    total: int = x.args[0]
    for atom, factor in x.args[1]:
        if (term := _sum_exactly(atom, shapes, numbers)) is None:
            return None
        total += factor * term
    return total


class Divisor(HostValue):
    """A number that is divided by: itself, and the multiplier and shift that do it; see Hacker's Delight, 10-9."""

    def value(self, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any]) -> bytes:
        """The field's bytes: x // |d| is 2 x * multiplier >> 32 + shift for every x from 0 to 2^31 - 1; what 0 divides is 0."""
        d = Number(self.of).value(shapes, numbers)
        bits = max(0, abs(d) - 1).bit_length()
        return struct.pack("<iIi", d, -(-(1 << 31 + bits) // abs(d)) if d else 0, bits)


FieldContent = ArrayAddress | ArraySize | ArrayStride | PyramidAddress | HostValue
