"""Arithmetic of expressions, simplified where it can be.

Integers are kept as sums of multiples, ``lin``, so that common terms cancel and the coefficient of kv is at hand. Operands whose
order makes no difference are sorted by their digests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ProblemError
from .expressions import FUNCTIONS, Expr, const, is_const, make, nodes, tracer, wrap
from .formulas import FORMULAS

RANK = {"bool": 0, "int": 1, "long": 2, "float": 3}
MOST_FACTORS = 1024  # of a power that is a product
COMMUTATIVE = ("add", "mul", "imul", "min", "max", "eq", "and", "or", "xor", "band", "bor", "bxor")


def as_type(x: Any, kind: str) -> Expr:
    """The value as a "bool", "int" or "float"."""
    x = wrap(x)
    if x.type == kind or (kind == "int" and x.type == "long"):
        return x
    if x.op == "const":
        return const({"bool": bool, "int": int, "float": float}[kind](x.args[0]))
    if kind == "bool":
        return FUNCTIONS["ne"](x, 0)
    return make("trunc" if x.type == "float" else "cast", kind, (x,))


def wider(*operands: Expr) -> str:
    """The type that holds the values of all operands."""
    return max((x.type for x in operands), key=RANK.__getitem__)


def tame(x: Expr) -> Expr:
    """x as an integer that arithmetic may begin with: brought into +-LOADED where it is raw."""
    return make("saturate", "int", (x,)) if x.raw else x


def fold(op: str, kind: str, *args: Expr) -> Expr:
    """The value of an operation if its operands are known, else an expression, whose operands are sorted where they may be."""
    if all(x.op == "const" for x in args):
        with np.errstate(all="ignore"):
            return as_type(const(np.asarray(FORMULAS[op](np, *(np.asarray(x.args[0]) for x in args))).item()), kind)
    return make(op, kind, ordered(op, args))


def ordered(op: str, args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """The operands, sorted where their order makes no difference."""
    return tuple(sorted(args, key=lambda x: x.digest)) if op in COMMUTATIVE else args


def linear(x: Expr) -> tuple[int, dict[Expr, int]]:
    """An integer as a constant and multiples."""
    x = tame(as_type(x, "int"))
    if x.op == "const":
        return x.args[0], {}
    return (x.args[0], dict(x.args[1])) if x.op == "lin" else (0, {x: 1})


def from_linear(constant: int, terms: dict[Expr, int]) -> Expr:
    """The inverse of ``linear``."""
    kept = sorted(((atom, c) for atom, c in terms.items() if c), key=lambda term: term[0].digest)
    if not kept:
        return const(constant)
    if constant == 0 and len(kept) == 1 and kept[0][1] == 1:
        return kept[0][0]
    return make("lin", "int", (constant, tuple(kept)))


def combine(a: Expr, b: Expr, factor: int) -> Expr:
    """a + factor * b, of integers."""
    (constant, terms), (other, more) = linear(a), linear(b)
    for atom, c in more.items():
        terms[atom] = terms.get(atom, 0) + factor * c
    return from_linear(constant + factor * other, terms)


def has_float(a: Expr, b: Expr) -> bool:
    """Says whether one of two is a float."""
    return "float" in (a.type, b.type)


def add(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if not has_float(a, b):
        return combine(a, b, 1)
    a, b = as_type(a, "float"), as_type(b, "float")
    return b if is_const(a, 0) else a if is_const(b, 0) else fold("add", "float", a, b)


def sub(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if not has_float(a, b):
        return combine(a, b, -1)
    a, b = as_type(a, "float"), as_type(b, "float")
    return a if is_const(b, 0) else negative(b) if is_const(a, 0) else fold("sub", "float", a, b)


def negative(a: Any) -> Expr:
    a = wrap(a)
    return fold("neg", "float", a) if a.type == "float" else combine(const(0), a, -1)


def mul(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if not has_float(a, b):
        a, b = (tame(as_type(x, "int")) for x in (a, b))
        for x, y in ((a, b), (b, a)):
            if y.op == "const":
                return combine(const(0), x, y.args[0])
        return make("imul", "int", ordered("imul", (a, b)))
    a, b = as_type(a, "float"), as_type(b, "float")
    return b if is_const(a, 1) else a if is_const(b, 1) else fold("mul", "float", a, b)


def div(a: Any, b: Any) -> Expr:
    return fold("div", "float", as_type(a, "float"), as_type(b, "float"))


def integers(op: str, a: Any, b: Any) -> Expr:
    """An operation on integers, by the name that it has among expressions."""
    a, b = wrap(a), wrap(b)
    if has_float(a, b):
        raise ProblemError(f"{op} of a float; it is for integers: convert by .int() or .astype(int).")
    a, b = as_type(a, "int"), as_type(b, "int")
    if op in ("floordiv", "mod"):
        return fold(op, "int", tame(a), tame(b))
    if op in ("shl", "shr"):
        return fold(op, a.type, a, tame(b))
    return fold(op, wider(a, b), a, b)


def floor_divide(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if has_float(a, b):
        return floor(div(a, b))
    return a if is_const(b, 1) else integers("floordiv", a, b)


def remainder(a: Any, b: Any) -> Expr:
    a, b = wrap(a), wrap(b)
    if has_float(a, b):
        return sub(a, mul(floor(div(a, b)), b))
    return integers("mod", a, b)


def power(a: Any, b: Any) -> Expr:
    """a to the power of b. A constant a > 0 makes a power of 2, and a b that is an int, literal or captured, products. All else
    is C's pow."""
    a, b = wrap(a), wrap(b)
    if a.op == "const" and 0 < a.args[0] < math.inf and b.op != "const":
        return _raise_constant(a, b)
    if b.type == "int" and b.op != "const" and not b.deps and not any(node.op == "load" for node in nodes(b)):
        b = const(tracer.get().specialise(b))
    if b.op == "const" and abs(b.args[0]) <= MOST_FACTORS and b.args[0] % 1 == 0:
        n = int(b.args[0])
        product = _multiply(as_type(a, "float") if n < 0 or has_float(a, b) else a, abs(n))
        return div(1.0, product) if n < 0 else product
    if is_const(b, 0.5):
        return unary("sqrt", a)
    if not has_float(a, b):
        if b.op == "const":
            raise ProblemError(
                f"an integer to the power of {b.args[0]}; as a product it has at most {MOST_FACTORS:,} factors: convert "
                "one of both by .float() or .astype(float)."
            )
        raise ProblemError(
            "an integer to the power of an integer that is neither a literal nor a captured int; convert one of both by .float() "
            "or .astype(float), or read a table of the powers."
        )
    return fold("pow", "float", as_type(a, "float"), as_type(b, "float"))


def _raise_constant(base: Expr, n: Expr) -> Expr:
    """A constant base to the power of n, as a power of 2. A whole base to the power of an integer >= 0 is a whole number."""
    factor = unary("log2", base)
    result = unary("exp2", n if is_const(factor, 1) else mul(n, factor))
    if n.type == "float" or base.args[0] % 1 or factor.args[0] % 1 == 0:
        return result
    return FUNCTIONS["where"](FUNCTIONS["lt"](n, 0), result, floor(add(result, 0.5)))


def _multiply(x: Expr, n: int) -> Expr:
    """x to the power of n."""
    if n <= 8:
        return functools.reduce(mul, [x] * n, as_type(const(1), "float" if x.type == "float" else "int"))
    half = _multiply(x, n // 2)
    return mul(mul(half, half), x) if n % 2 else mul(half, half)


def unary(op: str, a: Any) -> Expr:
    """A function of one float, by its name."""
    return fold(op, "float", as_type(a, "float"))


def absolute(a: Any) -> Expr:
    a = wrap(a)
    if a.type == "float":
        return fold("abs", "float", a)
    constant, terms = linear(a)
    first = next(iter(sorted(terms.items(), key=lambda term: term[0].digest)), None)
    if first is not None and first[1] < 0:  # abs(-x) is abs(x): one form of both
        a = from_linear(-constant, {atom: -c for atom, c in terms.items()})
    return fold("abs", "int", tame(as_type(a, "int")))


def floor(a: Any) -> Expr:
    a = wrap(a)
    return fold("floor", "float", a) if a.type == "float" else a


def extreme(op: str, a: Any, b: Any) -> Expr:
    """The "min" or "max" of two."""
    a, b = wrap(a), wrap(b)
    kind = wider(a, b)
    a, b = (x if x.type == kind or kind == "long" else as_type(x, kind) for x in (a, b))
    return a if a is b else fold(op, kind, a, b)


minimum: Callable[[Any, Any], Expr] = functools.partial(extreme, "min")
maximum: Callable[[Any, Any], Expr] = functools.partial(extreme, "max")
CONSTRUCTORS: dict[str, Callable[..., Expr]] = {
    "add": add, "sub": sub, "mul": mul, "div": div, "neg": negative, "imul": mul, "min": minimum, "max": maximum, "abs": absolute,
    "floor": floor, "saturate": tame,
    **{op: functools.partial(integers, op) for op in ("floordiv", "mod", "shl", "shr", "band", "bor", "bxor")},
}  # fmt: skip
