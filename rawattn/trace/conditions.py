"""Conditions and choices of expressions, simplified where they can be, and the same form over other operands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..errors import ProblemError
from .arithmetic import CONSTRUCTORS, as_type, combine, extreme, fold, from_linear, has_float, integers, linear, ordered, wider
from .expressions import INSIDE, KV, KV_LEN, OFFSET, Q_LEN, Expr, Q, const, make, wrap


def known_bounds(constant: int, terms: dict[Expr, int]) -> tuple[float, float]:
    """The bounds of a sum, from what is always true: indices and lengths are not negative, an index is less than its length."""
    ends = []
    for sign in (1, -1):
        rest = {atom: sign * c for atom, c in terms.items()}
        top: float = sign * constant
        for index, length in ((Q, Q_LEN), (KV, KV_LEN)):
            c = rest.get(index, 0)
            if c > 0 and rest.get(length, 0) < 0:
                both = min(c, -rest[length])
                rest[index], rest[length] = c - both, rest[length] + both
                top -= both
        known = all(c < 0 and atom.op == "var" and atom is not INSIDE for atom, c in rest.items() if c)
        ends.append(top if known else math.inf)
    return -ends[1], ends[0]


def compare(op: str, a: Any, b: Any) -> Expr:
    """The comparison a < b, a <= b or a == b: "lt", "le", "eq". Between integers kv is brought to one side alone where it can be,
    and common terms cancel."""
    a, b = wrap(a), wrap(b)
    if has_float(a, b):
        return fold(op, "bool", as_type(a, "float"), as_type(b, "float"))
    if op == "eq" and a.type == b.type == "bool":
        return invert(logical("xor", a, b))
    a, b = as_type(a, "int"), as_type(b, "int")
    if a.type == "long" or b.type == "long":
        return fold(op, "bool", a, b)
    constant, terms = linear(combine(a, b, -1))
    if op == "lt":  # a - b + 1 <= 0
        constant += 1
    low, high = known_bounds(constant, terms)
    if low > 0 or (op == "eq" and high < 0):
        return const(False)
    if high <= 0 and (op != "eq" or low >= 0):
        return const(True)
    form = "eq" if op == "eq" else "le"
    alone = OFFSET if OFFSET in terms else KV
    if alone in terms and not any(alone.args[0] in atom.deps for atom in terms if atom is not alone):
        c = terms.pop(alone)
        rest = from_linear(-constant, {atom: -k for atom, k in terms.items()})
        side, rest = combine(const(0), alone, abs(c)), rest if c > 0 else combine(const(0), rest, -1)
        return make(form, "bool", ordered(form, (rest, side) if c < 0 else (side, rest)))
    if a.raw or b.raw:
        return make(op, "bool", ordered(op, (a, b)))
    above = from_linear(max(constant, 0), {atom: k for atom, k in terms.items() if k > 0})
    below = from_linear(max(-constant, 0), {atom: -k for atom, k in terms.items() if k < 0})
    return make(form, "bool", ordered(form, (above, below)))


def logical(op: str, a: Any, b: Any) -> Expr:
    """The "and", "or" or "xor" of two conditions, or of the bits of two integers."""
    a, b = wrap(a), wrap(b)
    if not a.type == b.type == "bool":
        return integers({"and": "band", "or": "bor", "xor": "bxor"}[op], a, b)
    for x, y in ((a, b), (b, a)):
        if y.op == "const":
            return {"and": x if y.args[0] else y, "or": y if y.args[0] else x, "xor": invert(x) if y.args[0] else x}[op]
    if op == "xor":
        return const(False) if a is b else make(op, "bool", ordered(op, (a, b)))
    joined = {*parts(op, a), *parts(op, b)}
    if any(invert(x) in joined for x in joined):  # a condition and its opposite
        return const(op == "or")
    first, *rest = sorted(joined, key=lambda x: x.digest)
    return functools.reduce(lambda x, y: make(op, "bool", (x, y)), rest, first)


def parts(op: str, x: Expr) -> list[Expr]:
    """The conditions that x joins by "and"s, or by "or"s."""
    return [part for a in x.args for part in parts(op, a)] if x.op == op else [x]


def invert(a: Any) -> Expr:
    a = wrap(a)
    if a.type == "bool":
        if a.op in ("le", "lt") and "float" not in (a.args[0].type, a.args[1].type):  # NaN is neither less nor not
            return compare("lt" if a.op == "le" else "le", a.args[1], a.args[0])
        return a.args[0] if a.op == "not" else fold("not", "bool", a)
    if a.type == "float":
        raise ProblemError("~ of a float; it is for conditions and integers.")
    return combine(const(-1), a, -1) if a.type != "long" else integers("bxor", a, const(-1))


def where(condition: Any, a: Any, b: Any) -> Expr:
    """a where the condition holds, else b."""
    c, a, b = as_type(condition, "bool"), wrap(a), wrap(b)
    kind = wider(a, b)
    a, b = (x if kind == "long" else as_type(x, kind) for x in (a, b))
    if c.op == "const":
        return a if c.args[0] else b
    if a is b:
        return a
    if kind == "bool":
        return _choose(c, a, b)
    if c.op == "le" and len({a, b, *c.args}) == 2 and kind != "float":
        return extreme("min" if c.args[0] is a else "max", a, b)
    return make("where", kind, (c, a, b))


def _choose(c: Expr, a: Expr, b: Expr) -> Expr:
    """Writes ``where(c, a, b)`` of three conditions by and, or and not."""
    a, b = const(True) if a is c else a, const(False) if b is c else b
    if a.op == "const":
        return logical("or", c, b) if a.args[0] else logical("and", invert(c), b)
    if b.op == "const":
        return logical("or", invert(c), a) if b.args[0] else logical("and", c, a)
    return logical("or", logical("and", c, a), logical("and", invert(c), b))


_CONSTRUCTORS: dict[str, Callable[..., Expr]] = {
    **CONSTRUCTORS, "where": where, "not": invert,
    **{op: functools.partial(compare, op) for op in ("lt", "le", "eq")},
    **{op: functools.partial(logical, op) for op in ("and", "or", "xor")},
}  # fmt: skip


def rebuild(node: Expr, done: dict[Expr, Expr]) -> Expr:
    """The node over ``done``, its operands' new forms."""
    if node.op == "lin":
        parts = (combine(const(0), done[atom], c) for atom, c in node.args[1])
        return functools.reduce(lambda x, y: combine(x, y, 1), parts, const(node.args[0]))
    args = [done[a] if isinstance(a, Expr) else a for a in node.args]
    if node.op in _CONSTRUCTORS:
        return _CONSTRUCTORS[node.op](*args)
    return make(node.op, node.type, tuple(args))
