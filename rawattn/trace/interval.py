"""Masks whose queries keep one run of keys each, as their comparisons say by themselves: its first and its last key are
expressions of the query."""

from __future__ import annotations

import functools
from typing import NamedTuple

from .arithmetic import extreme
from .canonical import Code
from .conditions import logical, parts
from .expressions import KV, Expr, const, nodes


class Interval(NamedTuple):
    """The positions of the first and of the last key that a query keeps; None stands for those of the sequence. Where ``keeps``
    is false it keeps none, whatever these are."""

    first: Expr | None
    last: Expr | None
    keeps: Expr

    @property
    def deps(self) -> set[str]:
        """The variables that it depends on."""
        return {name for x in (self.first, self.last, self.keeps) if x is not None for name in x.deps}

    @property
    def reads_queries(self) -> bool:
        """Says whether it reads elements of the query's own."""
        found = [x for x in (self.first, self.last, self.keeps) if x is not None]
        return any(node.op == "load" and "q" in node.deps for node in nodes(*found))


@functools.lru_cache(maxsize=1024)
def interval_of(code: Code) -> Interval | None:
    """The interval of a mask that is a conjunction of bounds of kv, and of conditions on the query; None for others."""
    first: Expr | None = None
    last: Expr | None = None
    keeps = const(True)
    for part in parts("and", code.root):
        if "kv" not in part.deps:
            keeps = logical("and", keeps, part)
            continue
        is_first, bound = _find_bound(part)
        if bound is None:
            return None
        if is_first:
            first = bound if first is None else extreme("max", first, bound)
        else:
            last = bound if last is None else extreme("min", last, bound)
    return Interval(first, last, keeps)


def _find_bound(x: Expr) -> tuple[bool, Expr | None]:
    """The one side of kv that a condition bounds, whether it is the first key's, and the bound: the widest of several joined by
    "or". None where it says anything else."""
    if x.op == "or":
        sides = [_find_bound(part) for part in parts("or", x)]
        bounds = [bound for _, bound in sides if bound is not None]
        if len(bounds) < len(sides) or len({is_first for is_first, _ in sides}) > 1:
            return False, None
        return sides[0][0], functools.reduce(functools.partial(extreme, "min" if sides[0][0] else "max"), bounds)
    if x.op == "le":
        for is_first, key, bound in ((False, *x.args), (True, *x.args[::-1])):
            if key is KV and bound.type == "int" and "kv" not in bound.deps:
                return is_first, bound
    return False, None
