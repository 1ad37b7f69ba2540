"""The classes of boxes of queries and keys: a mask keeps no pair of a box, every one, or some. On the host as in kernels, which
ask tile by tile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .canonical import Code
from .conditions import compare, logical, parts, rebuild
from .expressions import Expr, Q, children, make, nodes
from .pyramid import Pyramid, range_of_load
from .ranges import Range, bounds, exactly

EMPTY, CUT, FULL = 0, 1, 2


@functools.lru_cache(maxsize=256)
def strengthen(code: Code) -> Expr:
    """The condition of a mask, to be bounded, with what follows from two of its comparisons together. From a == b and one of a
    follows that of b: a group of -1 that is excluded on one side alone is so on both. From a <= b and b <= c follows a <= c."""
    done: dict[Expr, Expr] = {}
    for node in nodes(code.root):
        done[node] = rebuild(node, done) if node.op in ("and", "or", "not") else node
        if node.op == "and":
            for condition in _derive(parts("and", node)):
                done[node] = logical("and", done[node], condition)
    return done[code.root]


def by_blocks(code: Code) -> bool:
    """Says whether all queries of a block keep the same keys: the mask sees no more of a query than q // n."""
    uses = [node for node in nodes(code.root) if any(child is Q for child in children(node))]
    return bool(uses) and all(node.op == "floordiv" for node in uses)


def _derive(asked: Sequence[Expr]) -> Iterator[Expr]:
    """The conditions that follow from two of those in ``asked`` and depend on the query or the key."""
    orders = [x for x in asked if x.op in ("lt", "le")]
    for equal in (x for x in asked if x.op == "eq"):
        for a, b in (equal.args, equal.args[::-1]):
            for x in (x for x in orders if any(y is a for y in x.args)):
                yield make(x.op, "bool", tuple(b if y is a else y for y in x.args))
    for x, y in itertools.permutations(orders, 2):
        if x.args[1] is y.args[0]:
            condition = compare("lt" if "lt" in (x.op, y.op) else "le", x.args[0], y.args[1])
            if condition.deps & {"q", "kv"}:
                yield condition


def classify(
    code: Code, arrays: Sequence[Any], numbers: Sequence[Any], b: Any, h: Any, q: tuple[Any, Any], kv: tuple[Any, Any], q_len:
    Any, kv_len: Any, q_start: Any = 0, kv_start: Any = 0, pyramids: dict[tuple[int, int], Pyramid] | None = None,
) -> Any:  # fmt: skip
    """The class of each box, EMPTY, CUT or FULL; its bounds are arrays of positions, both inclusive. ``pyramids`` keeps those of
    the arrays for the next call with the same arrays."""
    kept = {} if pyramids is None else pyramids
    values = {"b": b, "h": h, "q_len": q_len, "kv_len": kv_len, "q_start": q_start, "kv_start": kv_start}
    box = {name: exactly(x, "int") for name, x in values.items()}
    box |= {name: Range(*(np.asarray(x, np.int64) for x in ends)) for name, ends in (("q", q), ("kv", kv))}

    def pyramid(number: int, axes: int) -> Pyramid:
        if (number, axes) not in kept:
            kept[number, axes] = Pyramid(arrays[number], axes)
        return kept[number, axes]

    def leaf(x: Expr, operands: Sequence[Range]) -> Range:
        match x.op:
            case "var":
                return box[x.args[0]]
            case "param":
                return exactly(np.float32(numbers[x.args[0]]) if x.type == "float" else numbers[x.args[0]], x.type)
            case "dim":
                return exactly(arrays[x.args[0]].shape[x.args[1]], "int")
        return range_of_load(arrays[x.args[0]], x.type, operands, functools.partial(pyramid, x.args[0]))

    root = strengthen(code)
    truth = bounds(root, leaf)[root]
    lo, hi = np.broadcast_arrays(truth.lo, truth.hi, *q, *kv)[:2]
    return np.where(hi == 0, EMPTY, np.where(lo == 1, FULL, CUT)).astype(np.int8)
