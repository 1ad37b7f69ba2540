"""Bounds of expressions over boxes of indices, by interval arithmetic on NumPy arrays: many boxes at once.

``cuda_src/function/range.cuh`` is the same in CUDA C, and says the same of what can be known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .expressions import LOADED, Expr, nodes
from .formulas import FORMULAS

LIMITS = {"bool": (0, 1), "int": (-(1 << 31), (1 << 31) - 1), "long": (-(1 << 63), (1 << 63) - 1), "float": (-np.inf, np.inf)}
MOST = float(np.finfo(np.float32).max)  # float32's largest number
FAR = 1 << 61  # beyond all integers that count; the sum of two such fits int64


@dataclasses.dataclass(frozen=True)
class Range:
    """The bounds, both inclusive, of values over each box, and whether NaN may be among them besides. A bool's are 0 and 1: it is
    always true where lo is 1, and never where hi is 0."""

    lo: Any
    hi: Any
    nan: Any = False

    @property
    def point(self) -> Any:
        """Says for each box whether there is one value."""
        return (self.lo == self.hi) & ~np.asarray(self.nan)

    def __str__(self) -> str:
        """The bounds of one box, in words."""
        lo, hi = np.asarray(self.lo).item(), np.asarray(self.hi).item()
        ends = (lo, hi) in LIMITS.values()
        return "of any value" if ends else f"from {lo:g} to {hi:g}" if isinstance(lo, float) else f"from {lo} to {hi}"


def anything(kind: str, nan: Any = True) -> Range:
    """The range of any value of a kind."""
    lo, hi = LIMITS[kind]
    return Range(np.float64(lo), np.float64(hi), nan) if kind == "float" else Range(np.int64(lo), np.int64(hi))


def exactly(x: Any, kind: str) -> Range:
    """The range of the one value x."""
    x = np.asarray(x)
    if kind != "float":
        return Range(x.astype(np.int64), x.astype(np.int64))
    x, nan = x.astype(np.float64), np.isnan(x.astype(np.float64))
    return Range(np.where(nan, np.inf, x), np.where(nan, -np.inf, x), nan)  # but for NaN it is empty


def rounded(x: float) -> Range:
    """The range of a float that is given as float64: kernels, and floats of a mask, have it as float32."""
    with np.errstate(all="ignore"):
        return hull(exactly(x, "float"), exactly(np.float32(x), "float"))


def _round_to_float32(r: Range) -> Range:
    """The range with infinite bounds where float32 does not hold them, as in kernels: two such may meet, and make NaN."""
    lo, hi = (
        np.where((np.abs(x) >= MOST) & ~np.isinf(x), np.where(x > 0, up, down), x)
        for x, up, down in ((r.lo, MOST, -np.inf), (r.hi, np.inf, -MOST))
    )
    return Range(lo, hi, r.nan)


def hull(*parts: Range) -> Range:
    """The range of the values of all parts."""
    lo, hi = (functools.reduce(f, ends) for f, ends in ((np.minimum, [p.lo for p in parts]), (np.maximum, [p.hi for p in parts])))
    return Range(lo, hi, functools.reduce(np.logical_or, [p.nan for p in parts]))


def _combine(f: Callable[[Any, Any], Any], a: Range, b: Range) -> Range:
    with np.errstate(all="ignore"):
        corners = [f(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    return Range(functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners))


def _add_nan(result: Range, *operands: Range) -> Range:
    """The range ``result`` of a function of floats, with NaN where an operand is NaN, or where two infinities or an infinity and
    0 meet."""
    nan = functools.reduce(np.logical_or, [x.nan for x in operands])
    far = functools.reduce(np.logical_or, [np.isinf(x.lo) | np.isinf(x.hi) for x in operands])
    lost = np.isnan(result.lo) | np.isnan(result.hi) | (nan & ~(result.lo <= result.hi))
    lost = lost | (far & (len(operands) > 1))
    return Range(np.where(lost, -np.inf, result.lo), np.where(lost, np.inf, result.hi), nan | lost)


def _widen(r: Range, lo: float = -np.inf, hi: float = np.inf) -> Range:
    """The range, some units in the last place of float32 wider, as kernels round elsewhere; the function itself stays within lo
    and hi. What infinity is widened to is NaN, over which fmax and fmin pass."""
    with np.errstate(all="ignore"):
        low, high = r.lo - np.abs(r.lo) * 2.0**-20 - 1e-37, r.hi + np.abs(r.hi) * 2.0**-20 + 1e-37
    return Range(np.fmax(low, lo), np.fmin(high, hi), r.nan)


def _map_ends(name: str, lo: float = -np.inf, hi: float = np.inf, domain: float = -np.inf) -> Callable[[Range], Range]:
    f = functools.partial(FORMULAS[name], np)

    def bounds(a: Range) -> Range:
        with np.errstate(all="ignore"):
            result = _widen(Range(f(np.maximum(a.lo, domain)), f(np.maximum(a.hi, domain))), lo, hi)
        return Range(result.lo, result.hi, a.nan | (a.lo < domain))

    return bounds


def _div(a: Range, b: Range) -> Range:
    zero = (b.lo <= 0) & (b.hi >= 0)
    r = _add_nan(_widen(_combine(np.divide, a, Range(np.where(zero, 1, b.lo), np.where(zero, 1, b.hi)))), a, b)
    return Range(np.where(zero, -np.inf, r.lo), np.where(zero, np.inf, r.hi), r.nan | zero)


def _pow(a: Range, b: Range) -> Range:
    """The range of a power of bases that are not negative; of others nothing is known."""
    far = np.isinf(a.lo) | np.isinf(a.hi) | np.isinf(b.lo) | np.isinf(b.hi) | a.nan | b.nan
    known = ~far & ((a.lo > 0) | ((a.lo == 0) & (b.lo >= 0)))
    r = _widen(_combine(np.power, Range(np.where(known, a.lo, 1), np.where(known, a.hi, 1)), b), 0.0)
    return Range(np.where(known, r.lo, -np.inf), np.where(known, r.hi, np.inf), ~known)


def _floordiv(a: Range, b: Range) -> Range:
    zero = (b.lo <= 0) & (b.hi >= 0)
    r = _combine(np.floor_divide, a, Range(np.where(zero, 1, b.lo), np.where(zero, 1, b.hi)))
    most = np.maximum(np.abs(a.lo), np.abs(a.hi))
    return Range(np.where(zero, -most, r.lo), np.where(zero, most, r.hi))


def _mod(a: Range, b: Range) -> Range:
    positive = b.lo > 0
    d = np.where(b.point & positive, b.lo, 1)
    same = b.point & positive & (a.lo // d == a.hi // d)
    inside = positive & (a.lo >= 0) & (a.hi < b.lo)
    most = np.maximum(
        np.maximum(np.abs(a.lo), np.abs(a.hi)), np.maximum(np.abs(b.lo), np.abs(b.hi))
    )  # of no or negative divisors
    lo = np.where(same, a.lo % d, np.where(inside, a.lo, np.where(positive, 0, -most)))
    return Range(lo, np.where(same, a.hi % d, np.where(inside, a.hi, np.where(positive, b.hi - 1, most))))


def _fill_bits(*parts: Any) -> Any:
    """All bits up to the highest one that any part, or its complement where it is negative, has."""
    bits = functools.reduce(np.bitwise_or, [np.where(x < 0, ~x, x) for x in parts])
    for shift in (1, 2, 4, 8, 16, 32):
        bits = bits | (bits >> shift)
    return bits


def _mask_bits(a: Range, mask: Any) -> Range:
    """The range of a & mask, whose bits are the lowest ones."""
    same = (a.lo & ~mask) == (a.hi & ~mask)
    return Range(np.where(same, a.lo & mask, 0), np.where(same, a.hi & mask, mask))


def _band(a: Range, b: Range) -> Range:
    both, some = a.point & b.point, (a.lo >= 0) | (b.lo >= 0)
    top = np.where(a.lo < 0, b.hi, np.where(b.lo < 0, a.hi, np.minimum(a.hi, b.hi)))
    lo = np.where(both, a.lo & b.lo, np.where(some, 0, ~_fill_bits(a.lo, a.hi, b.lo, b.hi)))
    result = Range(lo, np.where(both, a.lo & b.lo, np.where(some, top, np.maximum(a.hi, b.hi))))
    for x, y in ((a, b), (b, a)):
        lowest = y.point & (y.lo >= 0) & (y.lo & (y.lo + 1) == 0)
        bits = _mask_bits(x, y.lo)
        result = Range(np.where(lowest, bits.lo, result.lo), np.where(lowest, bits.hi, result.hi))
    return result


def _join_bits(f: Callable[[Any, Any], Any]) -> Callable[[Range, Range], Range]:
    """The rule of f, which is | or ^."""

    def bounds(a: Range, b: Range) -> Range:
        both, bits = a.point & b.point, _fill_bits(a.lo, a.hi, b.lo, b.hi)
        lo = np.where(both, f(a.lo, b.lo), np.where((a.lo < 0) | (b.lo < 0), ~bits, 0))
        return Range(lo, np.where(both, f(a.lo, b.lo), bits))

    return bounds


def _shr(a: Range, b: Range) -> Range:
    return _combine(np.right_shift, a, Range(np.clip(b.lo, 0, 63), np.clip(b.hi, 0, 63)))


def _shl(a: Range, b: Range) -> Range:
    factors = Range(np.int64(1) << np.clip(b.lo, 0, 31), np.int64(1) << np.clip(b.hi, 0, 31))
    small = (np.abs(a.lo) <= 1 << 31) & (np.abs(a.hi) <= 1 << 31)
    r = _combine(np.multiply, Range(np.where(small, a.lo, 0), np.where(small, a.hi, 0)), factors)
    lo, hi = LIMITS["long"]
    return Range(np.where(small, r.lo, lo), np.where(small, r.hi, hi))


def _abs(a: Range) -> Range:
    x, y = np.abs(a.lo), np.abs(a.hi)
    return Range(np.where((a.lo < 0) & (a.hi > 0), 0, np.minimum(x, y)), np.maximum(x, y), a.nan)


def _choose(f: Any) -> Callable[[Range, Range], Range]:
    """The rule of f, min or max, which passes over NaN: where one may be NaN, the other one alone may be the result."""

    def bounds(a: Range, b: Range) -> Range:
        result = Range(f(a.lo, b.lo), f(a.hi, b.hi), np.logical_and(a.nan, b.nan))
        if not (np.any(a.nan) or np.any(b.nan)):
            return result
        all_of = hull(result, a, b)
        some = np.logical_or(a.nan, b.nan)
        return Range(np.where(some, all_of.lo, result.lo), np.where(some, all_of.hi, result.hi), result.nan)

    return bounds


def _where(c: Range, a: Range, b: Range) -> Range:
    both = hull(a, b)
    lo = np.where(c.lo == 1, a.lo, np.where(c.hi == 0, b.lo, both.lo))
    hi = np.where(c.lo == 1, a.hi, np.where(c.hi == 0, b.hi, both.hi))
    return Range(lo, hi, np.where(c.lo == 1, a.nan, np.where(c.hi == 0, b.nan, both.nan)))


def _decide(always: Any, ever: Any) -> Range:
    return Range(np.asarray(always).astype(np.int64), np.asarray(ever).astype(np.int64))


def _has_no_nan(a: Range, b: Range) -> Any:
    return ~(np.asarray(a.nan) | np.asarray(b.nan))


def _xor(a: Range, b: Range) -> Range:
    known, differ = a.point & b.point, a.lo != b.lo
    return _decide(known & differ, ~known | differ)


def _trunc(a: Range) -> Range:
    lo, hi = (np.trunc(np.clip(x, -LOADED, LOADED)) for x in (a.lo, a.hi))
    nan = np.asarray(a.nan)  # which becomes 0
    return Range(np.where(nan, np.minimum(lo, 0), lo).astype(np.int64), np.where(nan, np.maximum(hi, 0), hi).astype(np.int64))


def _bound_wave(a: Range) -> Range:
    """The range of sin and cos, which infinity has none of."""
    return Range(np.full_like(a.lo, -1.0), np.full_like(a.lo, 1.0), True)


RULES: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: _add_nan(_widen(Range(a.lo + b.lo, a.hi + b.hi)), a, b),
    "sub": lambda a, b: _add_nan(_widen(Range(a.lo - b.hi, a.hi - b.lo)), a, b),
    "mul": lambda a, b: _add_nan(_widen(_combine(np.multiply, a, b)), a, b), "div": _div,
    "neg": lambda a: Range(-a.hi, -a.lo, a.nan), "imul": functools.partial(_combine, np.multiply), "floordiv": _floordiv,
    "mod": _mod, "band": _band, "bor": _join_bits(np.bitwise_or), "bxor": _join_bits(np.bitwise_xor), "shl": _shl, "shr": _shr,
    "abs": _abs, "where": _where, "min": _choose(np.minimum), "max": _choose(np.maximum),
    "lt": lambda a, b: _decide((a.hi < b.lo) & _has_no_nan(a, b), a.lo < b.hi),
    "le": lambda a, b: _decide((a.hi <= b.lo) & _has_no_nan(a, b), a.lo <= b.hi),
    "eq": lambda a, b: _decide(a.point & b.point & (a.lo == b.lo), (a.lo <= b.hi) & (b.lo <= a.hi)),
    "and": lambda a, b: Range(a.lo & b.lo, a.hi & b.hi), "or": lambda a, b: Range(a.lo | b.lo, a.hi | b.hi), "xor": _xor,
    "not": lambda a: Range(1 - a.hi, 1 - a.lo), "trunc": _trunc,
    "saturate": lambda a: Range(np.clip(a.lo, -LOADED, LOADED), np.clip(a.hi, -LOADED, LOADED)),
    "sign": lambda a: Range(np.sign(a.lo), np.sign(a.hi), a.nan),
    "sin": _bound_wave, "cos": _bound_wave, "exp": _map_ends("exp", 0.0), "expm1": _map_ends("expm1", -1.0),
    "log1p": _map_ends("log1p", domain=-1.0), "pow": _pow,
    "exp2": _map_ends("exp2", 0.0), "log": _map_ends("log", domain=0.0), "log2": _map_ends("log2", domain=0.0),
    "sqrt": _map_ends("sqrt", 0.0, domain=0.0), "tanh": _map_ends("tanh", -1.0, 1.0), "erf": _map_ends("erf", -1.0, 1.0),
    "floor": lambda a: Range(np.floor(a.lo), np.floor(a.hi), a.nan),
}  # fmt: skip


def _add_terms(node: Expr, done: dict[Expr, Range]) -> Range:
    lo = hi = np.int64(node.args[0])
    for atom, c in node.args[1]:
        ends = [np.clip(c * x, -FAR, FAR) for x in ((done[atom].lo, done[atom].hi) if c > 0 else (done[atom].hi, done[atom].lo))]
        lo, hi = np.clip(lo + ends[0], -FAR, FAR), np.clip(hi + ends[1], -FAR, FAR)
    return Range(lo, hi)


def _cast(node: Expr, a: Range) -> Range:
    if node.type != "float":
        return a
    lo, hi = (np.asarray(x).astype(np.float32).astype(np.float64) for x in (a.lo, a.hi))
    return Range(lo, hi) if node.args[0].type == "bool" else _widen(Range(lo, hi))


Leaf = Callable[[Expr, Sequence[Range]], Range]


def bounds(root: Expr, leaf: Leaf, check: Callable[[Expr, Range], None] | None = None) -> dict[Expr, Range]:
    """The bounds of every expression that the root is computed from. ``leaf`` gives those of variables, of what was captured, and
    of an element from the bounds of its indices; ``check`` sees the bounds of each integer before they are cut to what 32 bits
    hold."""
    done: dict[Expr, Range] = {}
    for node in nodes(root):
        operands = [done[a] for a in node.args if isinstance(a, Expr)]
        if node.op == "const":
            result = rounded(node.args[0]) if node.type == "float" else exactly(node.args[0], node.type)
        elif node.op in ("var", "param", "dim", "load"):
            result = leaf(node, operands)
        elif node.op == "lin":
            result = _add_terms(node, done)
        else:
            result = _cast(node, *operands) if node.op == "cast" else RULES[node.op](*operands)
        if check is not None:
            check(node, result)
        if node.type == "int":
            lo, hi = LIMITS["int"]
            result = Range(np.clip(result.lo, lo, hi), np.clip(result.hi, lo, hi))
        elif node.type == "float" and operands:
            result = _round_to_float32(result)
        done[node] = result
    return done
