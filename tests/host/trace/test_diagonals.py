"""All pairs of a diagonal get the same bits of the part that they are said to share, of scores that are drawn by chance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rawattn import trace
from rawattn.errors import ProblemError
from rawattn.trace.arithmetic import add, mul
from rawattn.trace.cuda_lines import Writer
from rawattn.trace.diagonals import diagonal
from rawattn.trace.evaluation import evaluate
from rawattn.trace.expressions import Expr
from rawattn.trace.formulas import FORMULAS
from rawattn.trace.placement import LESS, Lowering, position
from tests import expressions
from tests.expressions import COMPARISONS, CURVES, FLOATS, INTS, Choose, Tree

N, M, DRAWN = 30, 45, 150


def distance(choose: Choose) -> Tree:
    """A tree of positions, mostly of their distance alone."""
    q, kv = ("q",), ("kv",)
    found = ("int", "-", *((q, kv) if choose(range(2)) else (kv, q)))
    what = choose(["+", "+", "*", "uneven", "where", "", "", ""])
    if what == "uneven":
        return ("int", "-", ("int", "*", kv, ("literal", 3)), ("int", "*", q, ("literal", choose([2, 3]))))
    if what == "where":
        return ("where", ("compare", choose(list(COMPARISONS)), kv, choose([q, ("int", "*", q, ("literal", 2))])), found, kv)
    other = choose([("literal", choose([-3, 5, 40])), ("h",), q, ("load", "words", choose([q, ("h",)]))])
    return ("int", what, found, other if what == "+" else ("literal", choose([2, -3]))) if what else found


def integer(choose: Choose, depth: int) -> Tree:
    if depth == 0:
        return distance(choose)
    what, a = choose(["int", "//", "%", "load", "abs"]), integer(choose, depth - 1)
    if what == "int":
        return ("int", choose(list(INTS)), a, integer(choose, depth - 1))
    if what == "load":
        return ("load", choose(["rows", "bytes"]), a)
    return (what, a, ("literal", choose([2, 3, 8])))


def real(choose: Choose, depth: int) -> Tree:
    what = choose(["cast", "load"] if depth == 0 else ["float", "curve", "load", "where"])
    if what == "cast":
        return ("cast", integer(choose, 1))
    if what == "load":
        return ("load", "reals", integer(choose, choose([0, 1])))
    if what == "curve":
        return ("curve", choose(list(CURVES)), real(choose, depth - 1))
    a, b = real(choose, depth - 1), real(choose, depth - 1)
    if what == "where":
        return ("where", ("compare", choose(list(COMPARISONS)), integer(choose, 0), integer(choose, 0)), a, b)
    return ("float", choose(list(FLOATS)), a, b)


def shared(score: Any) -> tuple[Expr | None, Any, Any]:
    """The part as ``cuda_text.py`` finds it where no index is checked, and what the score captured."""
    traced, arrays, numbers = trace.bind(score, "score")
    place = Writer(traced.code, "Number").place
    lowering, (root, _) = Lowering(place), position(traced.code.root, ())
    roots = [lowering(each, ())[0] for each in (root, add(mul(root, 1 / math.log(2)), LESS))]
    return diagonal(place, *roots), arrays, numbers


def test_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMULAS, "fma", lambda xp, a, b, c: a * b + c)
    monkeypatch.setitem(FORMULAS, "reciprocal", lambda xp, a: 1 / a)
    rng, found = np.random.default_rng(5), 0

    def choose(some: Any) -> Any:
        return list(some)[rng.integers(len(list(some)))]

    first = rng.integers(0, M, (N, M))  # a pair's key is first + offset, whatever run of keys it is in
    q, offset = np.arange(N)[:, None], np.arange(M)[None] - first
    at = {"q": q, "first": first, "offset": offset, "inside": offset, "h": 1, "q_len": N}
    for _ in range(DRAWN):
        captured = expressions.arrays(rng, 64, tame=False)
        try:
            part, arrays, numbers = shared(expressions.score(("float", "+", ("s",), real(choose, choose([0, 1, 2]))), captured))
        except ProblemError:
            continue
        if part is None:
            continue
        with np.errstate(all="ignore"):
            value = np.broadcast_to(evaluate(part, at, arrays, numbers, dtype=np.float32), (N, M))
        same = np.array_equal(value[1:, 1:], value[:-1, :-1], equal_nan=True)
        assert same, f"{part} differs between pairs of a diagonal"
        found += 1
    assert found > DRAWN / 3
