"""The columns of a mask: the parts that depend on a key alone. A warp computes them once for a tile, and threads of all queries
read them. And the parts that depend on a query alone, for kernels that keep keys."""

from __future__ import annotations

from collections.abc import Iterable

from .expressions import Expr, children, nodes
from .placement import ELEMENT, ROW, Placement

_LIGHT = {
    "var", "lin", "lt", "le", "eq", "and", "or", "xor", "not", "where", "min", "max", "neg", "cast", "abs", "band", "bor", "bxor"
}  # fmt: skip
_WORDS = {"bool": 1, "int": 1, "long": 2, "float": 1}
MOST_WORDS = 2  # of 32 bits


def columns(root: Expr, place: Placement) -> list[Expr]:
    """The outmost parts of a placed expression that depend on no query and take more than a few instructions; none where they
    are more words than kernels have room for."""
    return _find_outmost(root, {x for x in nodes(root) if place(x) == ELEMENT and not x.deps & {"q", "s", "less"}})


def of_queries(root: Expr, place: Placement) -> list[Expr]:
    """The outmost parts of a placed expression that depend on no key, as ``columns`` gives those that depend on no query."""
    return _find_outmost(root, {x for x in nodes(root) if place(x) == ROW and "first" not in x.deps})


def _find_outmost(root: Expr, wanted: set[Expr]) -> list[Expr]:
    order = nodes(root)
    heavy: set[Expr] = set()
    for x in order:
        if x in wanted and (x.op not in _LIGHT or any(a in heavy for a in children(x))):
            heavy.add(x)
    parents = [a for x in order if x not in wanted for a in children(x)]
    outmost = [x for x in order if x in heavy and (x is root or any(a is x for a in parents))]
    return outmost if column_bytes(outmost) <= 4 * MOST_WORDS else []


def column_bytes(values: Iterable[Expr]) -> int:
    """The bytes that ``values`` take of a key, in shared memory."""
    return 4 * sum(_WORDS[x.type] for x in values)
