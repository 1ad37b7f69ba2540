"""The functions of array libraries that a mask or a score may call on its arguments, by their names in torch, NumPy and CuPy.

An argument answers to them in every way: ``torch.tanh(x)``, ``np.tanh(x)``, ``x.tanh()``.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import ProblemError
from .arithmetic import (
    absolute,
    add,
    as_type,
    div,
    floor,
    floor_divide,
    integers,
    maximum,
    minimum,
    mul,
    negative,
    power,
    remainder,
    sub,
    unary,
)
from .conditions import compare, invert, logical, where
from .expressions import FUNCTIONS, Expr, const, is_const, wrap
from .formulas import UNARY
from .rows import of_each


def _kind(dtype: Any) -> str:
    name = str(dtype)
    return "bool" if "bool" in name else "float" if "float" in name else "int"


def _clamp(x: Any, min: Any = None, max: Any = None, **words: Any) -> Expr:  # the libraries' names
    low, high = words.get("a_min", min), words.get("a_max", max)
    clamped = wrap(x) if low is None else maximum(x, low)
    return clamped if high is None else minimum(clamped, high)


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> Expr:
    if rounding_mode in (None, "floor"):
        return div(a, b) if rounding_mode is None else floor_divide(a, b)
    raise ProblemError(f'rounding_mode is {rounding_mode!r}; it must be None or "floor".')


def _scale(f: Any) -> Any:
    return lambda a, b, alpha=1: f(a, mul(alpha, b))


def _to(x: Any, dtype: Any, *_: Any, **__: Any) -> Expr:
    return as_type(x, _kind(dtype))


def _make(value: Any) -> Any:
    """A function such as zeros or ones, with which functions of masks begin."""
    return lambda x, *_, dtype=bool, **__: as_type(const(value), _kind(dtype))


def _sigmoid(x: Any) -> Expr:
    return div(1, add(1, unary("exp", negative(x))))


def _softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Expr:
    """The softplus without overflow: max(x, 0) + log1p(exp(-|x|)), by one condition, so that its derivative at 0 is right."""
    x = as_type(x, "float")
    if not is_const(wrap(beta), 1):
        return div(_softplus(mul(x, beta), 1, threshold), beta)
    above = compare("lt", 0.0, x)
    result = add(where(above, x, 0.0), unary("log1p", unary("exp", where(above, negative(x), x))))
    return result if is_const(wrap(threshold), 20) else where(compare("lt", threshold, x), x, result)


def _logaddexp(a: Any, b: Any) -> Expr:
    """The logaddexp without overflow: max(a, b) + log1p(exp(-|a - b|)); of one infinity twice it is that infinity."""
    a, b = as_type(a, "float"), as_type(b, "float")
    above = compare("lt", b, a)
    same = logical("and", compare("eq", a, b), compare("eq", absolute(b), math.inf))
    below = where(same, 0.0, where(above, sub(b, a), sub(a, b)))
    return add(where(above, a, b), unary("log1p", unary("exp", below)))


def _gelu(x: Any, approximate: str = "none") -> Expr:
    if approximate != "none":
        inner = mul((2 / 3.141592653589793) ** 0.5, add(x, mul(0.044715, power(x, 3))))
        return mul(mul(0.5, x), add(1, unary("tanh", inner)))
    return mul(mul(0.5, x), add(1, unary("erf", mul(x, 0.5**0.5))))


def _leaky_relu(x: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Expr:
    return where(compare("lt", 0, x), x, mul(x, negative_slope))


def _tan(x: Any) -> Expr:
    return div(unary("sin", x), unary("cos", x))


def _ceil(x: Any) -> Expr:
    return negative(floor(negative(x)))


def _round(x: Any, decimals: int = 0) -> Expr:
    """x rounded to an integer, half to even."""
    x = wrap(x)
    if not is_const(wrap(decimals), 0):
        raise ProblemError("a number is rounded to digits; write round(x * 100) / 100.")
    if x.type != "float":
        return x
    low = floor(x)
    rest, half = sub(x, low), mul(low, 0.5)
    tie = logical("and", compare("eq", rest, 0.5), invert(compare("eq", floor(half), half)))
    return where(logical("or", compare("lt", 0.5, rest), tie), add(low, 1), low)


def _trunc(x: Any) -> Expr:
    return where(compare("lt", x, 0), _ceil(x), floor(x))


def _unary(name: str) -> Any:
    return lambda x: unary(name, x)


def _compare(op: str, *, swapped: bool = False, opposite: bool = False) -> Any:
    def f(a: Any, b: Any) -> Expr:
        result = compare(op, b, a) if swapped else compare(op, a, b)
        return invert(result) if opposite else result

    return f


def _logical(op: str) -> Any:
    return lambda a, b: logical(op, as_type(a, "bool"), as_type(b, "bool"))


def _bits(op: str) -> Any:
    return lambda a, b: logical(op, a, b)


FUNCTIONS |= {name: _unary(name) for name in UNARY}
FUNCTIONS |= {
    "where": where, "minimum": minimum, "maximum": maximum, "fmin": minimum, "fmax": maximum, "min": minimum, "max": maximum,
    "abs": absolute, "absolute": absolute, "fabs": absolute, "floor": floor, "ceil": _ceil, "clamp": _clamp, "clip": _clamp,
    "clamp_min": lambda x, low: maximum(x, low), "clamp_max": lambda x, high: minimum(x, high), "add": _scale(add),
    "radd": add, "sub": _scale(sub), "subtract": _scale(sub), "rsub": lambda a, b: sub(b, a), "mul": mul, "multiply": mul,
    "rmul": mul, "div": _divide, "divide": _divide, "true_divide": div, "rdiv": lambda a, b: div(b, a), "neg": negative,
    "negative": negative, "positive": wrap, "pow": power, "power": power,
    "float_power": lambda a, b: power(as_type(a, "float"), b),
    "square": lambda x: power(x, 2), "floor_divide": floor_divide, "remainder": remainder, "mod": remainder,
    "reciprocal": lambda x: div(1, x), "rsqrt": lambda x: div(1, unary("sqrt", x)),
    "log10": lambda x: mul(unary("log", x), 0.4342944819032518),
    "sigmoid": _sigmoid, "expit": _sigmoid, "softplus": _softplus, "relu": lambda x: maximum(x, 0.0),
    "silu": lambda x: mul(x, _sigmoid(x)), "gelu": _gelu, "logical_and": _logical("and"), "logical_or": _logical("or"),
    "logical_xor": _logical("xor"), "logical_not": lambda x: invert(as_type(x, "bool")), "and": _bits("and"),
    "or": _bits("or"), "xor": _bits("xor"), "bitwise_and": _bits("and"), "bitwise_or": _bits("or"),
    "bitwise_xor": _bits("xor"), "invert": invert, "bitwise_not": invert, "lshift": lambda a, b: integers("shl", a, b),
    "rshift": lambda a, b: integers("shr", a, b), "left_shift": lambda a, b: integers("shl", a, b),
    "right_shift": lambda a, b: integers("shr", a, b), "bitwise_left_shift": lambda a, b: integers("shl", a, b),
    "bitwise_right_shift": lambda a, b: integers("shr", a, b), "lt": _compare("lt"), "less": _compare("lt"),
    "le": _compare("le"), "less_equal": _compare("le"), "gt": _compare("lt", swapped=True),
    "greater": _compare("lt", swapped=True), "ge": _compare("le", swapped=True),
    "greater_equal": _compare("le", swapped=True), "eq": _compare("eq"), "equal": _compare("eq"),
    "ne": _compare("eq", opposite=True), "not_equal": _compare("eq", opposite=True), "bool": lambda x: as_type(x, "bool"),
    "int": lambda x: as_type(x, "int"), "long": lambda x: as_type(x, "int"), "float": lambda x: as_type(x, "float"),
    "double": lambda x: as_type(x, "float"), "to": _to, "astype": _to, "type": _to,
    "type_as": lambda x, other: as_type(x, wrap(other).type), "new_zeros": _make(0), "new_ones": _make(1),
    "zeros_like": _make(0), "ones_like": _make(1), "full_like": lambda x, value, **_: wrap(value), "clone": wrap,
    "detach": wrap, "contiguous": wrap, "round": _round, "around": _round, "rint": _round, "trunc": _trunc, "fix": _trunc,
    "logaddexp": _logaddexp, "leaky_relu": _leaky_relu, "tan": _tan, "isnan": lambda x: invert(compare("eq", x, x)),
}  # fmt: skip
FUNCTIONS |= {"truediv": div, "floordiv": floor_divide, "rpow": lambda a, b: power(b, a)}  # of a tensor and an argument
FUNCTIONS |= {name: of_each(f) for name, f in FUNCTIONS.items()}
