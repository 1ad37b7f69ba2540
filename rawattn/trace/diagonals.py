"""The diagonals of a score: the part that a pair's distance alone decides, kv - q. All pairs of a diagonal of a tile share it, so
a warp computes it once for each of them."""

from __future__ import annotations

from .arithmetic import combine, linear
from .expressions import FIRST, INSIDE, OFFSET, Expr, Q, children, nodes
from .placement import ELEMENT, Placement

_OF_PAIRS = {"q", "first", "offset", "inside", "s", "less"}
_FREE = ("const", "var")
_DEAR = {
    "load", "cast", "trunc", "floor", "floordiv", "mod", "div", "reciprocal", "sqrt", "log", "log2", "exp", "exp2", "expm1",
    "log1p", "pow", "tanh", "sin", "cos", "erf",
}  # fmt: skip
LEAST_WORK = 4  # of a part that is worth its way through shared memory; a dear operation counts as so many


def _is_of_distance(x: Expr, known: set[Expr]) -> bool:
    """Says whether x is the same for all pairs of a diagonal, as the expressions that are ``known`` are. A key that exists is
    first + offset and first + inside."""
    if x.op in ("lt", "le", "eq") and x.args[0].type == x.args[1].type == "int":
        terms = linear(combine(x.args[0], x.args[1], -1))[1]
    elif x.op == "lin":
        terms = dict(x.args[1])
    else:
        return x.op != "var" and all(a in known or not a.deps & _OF_PAIRS for a in children(x))
    q, first, offset, inside = (terms.pop(variable, 0) for variable in (Q, FIRST, OFFSET, INSIDE))
    return first == -q == offset + inside and all(a in known or not a.deps & _OF_PAIRS for a in terms)


def diagonal(place: Placement, *roots: Expr) -> Expr | None:
    """The one part of placed expressions that the distance alone decides and that takes more than a few instructions: a float,
    the same in all of them. None where there are none or several, or where an element is read for each pair besides, which comes
    by other means (``cuda_src/variant/ahead/elements.cuh``)."""
    outmost = [_find_outmost(root, place) for root in roots]
    if any(len(parts) != 1 or parts[0] is not outmost[0][0] for parts in outmost) or outmost[0][0].type != "float":
        return None
    of_distance = set(nodes(outmost[0][0]))
    besides = (x for x in nodes(*roots) if x.op == "load" and x not in of_distance)
    return None if any("q" in x.deps and x.deps & {"offset", "inside"} for x in besides) else outmost[0][0]


def _find_outmost(root: Expr, place: Placement) -> list[Expr]:
    order, of_distance = nodes(root), set[Expr]()
    for x in order:
        if place(x) == ELEMENT and _is_of_distance(x, of_distance):
            of_distance.add(x)
    used = {a for x in order if x not in of_distance for a in children(x)} | {root}
    return [x for x in order if x in of_distance and x in used and _count_work(x, of_distance) >= LEAST_WORK]


def _count_work(x: Expr, of_distance: set[Expr]) -> int:
    return sum(LEAST_WORK if y.op in _DEAR else y.op not in _FREE for y in nodes(x) if y in of_distance)
