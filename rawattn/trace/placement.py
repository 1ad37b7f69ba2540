"""The place where a kernel computes each part of an expression: as seldom as it can.

There are five places: constants; the host, for captured numbers and what is made of them alone; the head, once for each work;
the row, once for a query and a run of keys; and the element, whose key is ``first + offset`` with an offset that is a constant
where the loop over a fragment is unrolled. What is linear in the offset keeps it last: a comparison of positions is then one
instruction with an immediate operand, and a bias that is linear in positions one multiply-add."""

from __future__ import annotations

import math
from collections.abc import Collection

from .arithmetic import add, as_type, div, from_linear, linear, mul, negative, sub, unary
from .conditions import rebuild
from .expressions import FIRST, INSIDE, KV, OFFSET, Expr, S, children, const, is_const, make, nodes, var

PLACES = ("const", "host", "head", "row", "element")
HOST, ROW, ELEMENT = map(PLACES.index, ("host", "row", "element"))
SCALE = var("scale", "float")
LESS = var("less", "float")  # what is taken from the exponents of a row
_OWN = {"load": "head", "param": "host", "dim": "host"}
_VARIABLES = {"q": "row", "less": "row", "first": "row", "offset": "element", "inside": "element", "s": "element"}


class Placement:
    """The places of expressions, each found once."""

    def __init__(self) -> None:
        self._known: dict[Expr, int] = {}

    def __call__(self, x: Expr) -> int:
        """The number of the place where x is computed."""
        for node in nodes(x) if x not in self._known else ():
            own_place = _VARIABLES.get(node.args[0], "head") if node.op == "var" else _OWN.get(node.op, "const")
            self._known[node] = max([PLACES.index(own_place), *(self._known[a] for a in children(node))])
        return self._known[x]


def position(root: Expr, checked: Collection[tuple[Expr, int]]) -> tuple[Expr, set[tuple[Expr, int]]]:
    """The expression with kv as first + offset. Keys past the last one are asked for, too: what an index makes of kv is made of
    the last key there, unless the index is checked anyway."""
    done: dict[tuple[Expr, bool], Expr] = {(KV, False): FIRST + OFFSET, (KV, True): FIRST + INSIDE}
    moved = {(load, axis) for load, axis in checked if "kv" not in load.deps}

    def place(x: Expr, safe: bool) -> Expr:
        if (x, safe) in done:
            return done[x, safe]
        if "kv" not in x.deps:
            result = x
        elif x.op != "load":
            result = rebuild(x, {a: place(a, safe) for a in children(x)})
        else:
            axes = [(x, axis) in checked for axis in range(len(x.args) - 2)]
            indices = [place(i, not check) for i, check in zip(x.args[2:], axes, strict=True)]
            result = make("load", x.type, (*x.args[:2], *indices))
            moved.update((result, axis) for axis, check in enumerate(axes) if check)
        done[x, safe] = result
        return result

    return place(root, False), moved


def _multiply(a: Expr, b: Expr) -> Expr:
    return const(0.0) if is_const(a, 0) or is_const(b, 0) else mul(a, b)


class Lowering:
    """The lowering of scores: s as the dot product times the scale, and floats of each element by what the hardware has, as
    chains of multiply-adds. Another order rounds otherwise, so what an integer or a condition is made of stays as it is."""

    def __init__(self, place: Placement) -> None:
        self.place = place

    def __call__(self, root: Expr, checked: Collection[tuple[Expr, int]]) -> tuple[Expr, set[tuple[Expr, int]]]:
        order = nodes(root)
        exact = set(nodes(*(x for x in order if x.op in ("floor", "trunc", "lt", "le", "eq"))))
        done: dict[Expr, Expr] = {S: mul(S, SCALE)}
        for node in order:
            if node in done:
                continue
            lowered = rebuild(node, done)
            if node.type == "float" and node not in exact and self.place(lowered) == ELEMENT:
                lowered = self.straightened(self.lowered(lowered))
            done[node] = lowered
        return done[root], {(done[load], axis) for load, axis in checked if load in done}

    def lowered(self, x: Expr) -> Expr:
        """x by functions that are one instruction; their factors can then meet others."""
        match x.op:
            case "exp":
                return unary("exp2", mul(x.args[0], 1 / math.log(2)))
            case "log":
                return mul(unary("log2", x.args[0]), math.log(2))
            case "tanh":
                exponential = unary("exp2", mul(x.args[0], 2 / math.log(2)))
                return sub(1.0, mul(2.0, make("reciprocal", "float", (add(exponential, 1.0),))))
            case "div":
                a, b = x.args
                inverse = make("reciprocal", "float", (b,)) if self.place(b) == ELEMENT else div(1.0, b)
                return inverse if is_const(a, 1) else mul(a, inverse)
        return x

    def multiples(self, x: Expr) -> tuple[dict[Expr, Expr], Expr]:
        """x, a float of each element, as a sum of multiples of others, and the rest; factors and rest are of an outer place."""
        if self.place(x) < ELEMENT:
            return {}, x
        match x.op:
            case "add" | "sub":
                (a, rest), (b, other) = (self.multiples(y) for y in x.args)
                f = add if x.op == "add" else sub
                return {y: f(a.get(y, const(0.0)), b.get(y, const(0.0))) for y in {**a, **b}}, f(rest, other)
            case "neg":
                a, rest = self.multiples(x.args[0])
                return {y: negative(c) for y, c in a.items()}, negative(rest)
            case "mul" if min(map(self.place, x.args)) < ELEMENT:
                factor, other = sorted(x.args, key=self.place)
                a, rest = self.multiples(other)
                return {y: _multiply(c, factor) for y, c in a.items()}, _multiply(rest, factor)
            case "fma":
                a, rest = self.multiples(x.args[2])
                return {**a, x.args[1]: add(a.get(x.args[1], const(0.0)), x.args[0])}, rest
            case "cast":
                constant, terms = linear(x.args[0])
                slope, rest = terms.pop(OFFSET, 0), from_linear(constant, terms)
                if slope and self.place(rest) < ELEMENT:
                    return {make("cast", "float", (OFFSET,)): const(float(slope))}, as_type(rest, "float")
        return {x: const(1.0)}, const(0.0)

    def straightened(self, x: Expr) -> Expr:
        """x as a chain of multiply-adds: first what depends on s, which comes last, so that nothing is computed before it and
        kept; the offset, a constant, at the end."""
        terms, result = self.multiples(x)
        for atom in sorted(terms, key=lambda y: ("s" not in y.deps, y.op == "cast", y.digest)):
            factor = terms[atom]
            if is_const(factor, 1.0):
                result = add(atom, result)
            elif is_const(result, 0.0):
                result = mul(atom, factor)
            else:
                result = make("fma", "float", (factor, atom, result))
        return result
