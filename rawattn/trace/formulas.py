"""The value of each kind of expression, on arrays of NumPy or torch, from the array library and the values of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

UNARY = ("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sqrt", "sin", "cos", "erf", "sign")  # of a float, a float


def _divide(xp: Any, a: Any, b: Any) -> Any:
    """The quotient of integers, rounded down; by 0 it is 0."""
    return xp.where(b == 0, 0, a // xp.where(b == 0, 1, b))


def _erf(xp: Any, a: Any) -> Any:
    if xp is np:
        return np.vectorize(math.erf, otypes=[float])(a).astype(np.asarray(a).dtype)
    return xp.erf(a)


FORMULAS: dict[str, Callable[..., Any]] = {
    "add": lambda xp, a, b: a + b, "sub": lambda xp, a, b: a - b, "mul": lambda xp, a, b: a * b, "div": lambda xp, a, b: a / b,
    "neg": lambda xp, a: -a, "imul": lambda xp, a, b: a * b, "floordiv": _divide,
    "mod": lambda xp, a, b: a - _divide(xp, a, b) * b, "shl": lambda xp, a, b: a << b, "shr": lambda xp, a, b: a >> b,
    "band": lambda xp, a, b: a & b, "bor": lambda xp, a, b: a | b, "bxor": lambda xp, a, b: a ^ b,
    "min": lambda xp, a, b: xp.fmin(a, b), "max": lambda xp, a, b: xp.fmax(a, b), "abs": lambda xp, a: abs(a),
    "lt": lambda xp, a, b: a < b, "le": lambda xp, a, b: a <= b, "eq": lambda xp, a, b: a == b, "and": lambda xp, a, b: a & b,
    "or": lambda xp, a, b: a | b, "xor": lambda xp, a, b: a ^ b, "not": lambda xp, a: ~a,
    "where": lambda xp, c, a, b: xp.where(c, a, b), "floor": lambda xp, a: xp.floor(a), "erf": _erf,
    "pow": lambda xp, a, b: a**b,
}  # fmt: skip


def _call_by_name(name: str) -> Callable[..., Any]:
    return lambda xp, a: getattr(xp, name)(a)


FORMULAS |= {name: _call_by_name(name) for name in UNARY if name not in FORMULAS}
