"""The derivative of a score: reverse mode on its expression, whose result is an expression again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

from .arithmetic import add, div, fold, mul, negative, sub, unary
from .canonical import Code
from .conditions import where
from .expressions import Expr, S, const, nodes

_Rule = Callable[..., tuple["Expr | None", ...]]


def _derive_by_base(a: Expr, b: Expr) -> Expr:
    return where(b == 0, 0.0, mul(b, fold("pow", "float", a, sub(b, 1.0))))


# Of each operand, from the operands, the result and the gradient of the result; None where it is not followed. At a corner of
# min, max and abs it is that of one side.
RULES: dict[str, _Rule] = {
    "add": lambda a, b, y, g: (g, g), "sub": lambda a, b, y, g: (g, negative(g)),
    "mul": lambda a, b, y, g: (mul(g, b), mul(g, a)), "div": lambda a, b, y, g: (div(g, b), negative(div(mul(g, y), b))),
    "neg": lambda a, y, g: (negative(g),), "exp": lambda a, y, g: (mul(g, y),),
    "expm1": lambda a, y, g: (mul(g, add(y, 1.0)),), "log1p": lambda a, y, g: (div(g, add(a, 1.0)),),
    "pow": lambda a, b, y, g: (mul(g, _derive_by_base(a, b)), mul(g, where((a == 0) & (b >= 0), 0.0, mul(y, unary("log", a))))),
    "exp2": lambda a, y, g: (mul(g, mul(y, math.log(2))),), "log": lambda a, y, g: (div(g, a),),
    "log2": lambda a, y, g: (div(mul(g, 1 / math.log(2)), a),), "tanh": lambda a, y, g: (mul(g, sub(1.0, mul(y, y))),),
    "sqrt": lambda a, y, g: (div(mul(g, 0.5), y),), "sin": lambda a, y, g: (mul(g, unary("cos", a)),),
    "cos": lambda a, y, g: (negative(mul(g, unary("sin", a))),), "abs": lambda a, y, g: (mul(g, unary("sign", a)),),
    "erf": lambda a, y, g: (mul(g, mul(2 / math.sqrt(math.pi), unary("exp", negative(mul(a, a))))),),
    "min": lambda a, b, y, g: (where(a <= b, g, 0.0), where(a <= b, 0.0, g)),
    "max": lambda a, b, y, g: (where(b <= a, g, 0.0), where(b <= a, 0.0, g)),
    "where": lambda c, a, b, y, g: (None, where(c, g, 0.0), where(c, 0.0, g)),
}  # fmt: skip


def gradients(root: Expr) -> dict[Expr, Expr]:
    """The derivatives of a score by s, and by each element of a float array and each float that it reads."""
    adjoint: dict[Expr, Expr] = {root: const(1.0)}
    for node in reversed(nodes(root)):
        if node not in adjoint or node.type != "float" or node.op not in RULES:
            continue
        for operand, part in zip(node.args, RULES[node.op](*node.args, node, adjoint[node]), strict=True):
            if part is not None and operand.type == "float":
                adjoint[operand] = add(adjoint[operand], part) if operand in adjoint else part
    return {x: g for x, g in adjoint.items() if x.op in ("load", "param") or x is S}


def slope(root: Expr) -> Expr:
    """The derivative of a score by s."""
    return gradients(root).get(S, const(0.0))


class ElementGradient(NamedTuple):
    """The derivative of a score by an element of an array that it reads: ``node`` is the number of the element among the code's
    nodes."""

    node: int
    load: Expr
    derivative: Expr

    @property
    def array(self) -> int:
        """The number of the array that the element is of."""
        number: int = self.load.args[0]
        return number


@functools.lru_cache(maxsize=256)
def by_elements(code: Code) -> tuple[ElementGradient, ...]:
    """The derivatives of a score by the elements of float arrays that it reads, in the order of the code's nodes."""
    gradient_of = gradients(code.root)
    return tuple(
        ElementGradient(i, x, gradient_of[x]) for i, x in enumerate(nodes(code.root)) if x.op == "load" and x in gradient_of
    )


def gathering(load: Expr, checked: Collection[int] = ()) -> str:
    """The kind of sum that makes a captured array's gradient, by what the indices of its element depend on: in "tiles", where
    they know no query and no key; in "rows" or in "columns" of a tile, where they know the query, or the key, alone; in "pairs",
    where one index is the query itself, one the key, and no other knows either, so that each element belongs to one pair of a
    head; in "diagonals", where they know both otherwise; and "scattered", where they know the dot product. ``checked`` are
    the axes whose index is brought into the array, and may so be that of several queries or keys."""
    indices = load.args[2:]
    deps = frozenset[str]().union(*(i.deps for i in indices)) & {"q", "kv", "s"}
    if "s" in deps:
        return "scattered"
    if len(deps) < 2:
        return {"": "tiles", "q": "rows", "kv": "columns"}["".join(deps)]
    knowing = [i for i in indices if i.deps & {"q", "kv"}]
    return "pairs" if len(knowing) == 2 and {"q", "kv"} <= own_indices(load, checked) else "diagonals"


def own_indices(load: Expr, checked: Collection[int] = ()) -> set[str]:
    """The variables that are indices of the element ``load`` themselves, and are not brought into the array."""
    return {i.args[0] for axis, i in enumerate(load.args[2:]) if i.op == "var" and axis not in checked}
