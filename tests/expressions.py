"""Masks and scores that are drawn by chance: trees of operators, which run on symbols and on arrays alike."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tree = tuple[Any, ...]
Choose = Callable[[Sequence[Any]], Any]  # one of some
LITERALS = [-70, -3, -1, 0, 1, 2, 3, 5, 16, 31, 64, 1000, 1 << 20]
DIVISORS = [-7, -1, 1, 2, 3, 8, 16, 60]
NUMBERS = (3, 17, -5, 40)
FRACTIONS = (0.75, -2.5, 1e9)
INTS: dict[str, Any] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "min": np.minimum, "max": np.maximum, "&": operator.and_,
    "|": operator.or_, "^": operator.xor,
}  # fmt: skip
COMPARISONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">=": operator.ge, ">": operator.gt}
FLOATS: dict[str, Any] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "min": np.fmin,
    "max": np.fmax,
}
CURVES: dict[str, Any] = {"abs": np.abs, "floor": np.floor, "neg": operator.neg, "sqrt": np.sqrt, "exp": np.exp, "tanh": np.tanh}
ARRAYS = ("rows", "words", "longs", "bytes", "pairs", "flags", "reals")


def arrays(rng: np.random.Generator, n: int, *, tame: bool) -> dict[str, npt.NDArray[Any]]:
    """Returns what the trees capture; unless they are tame, with the numbers at the edges of their formats."""
    edges = [-(1 << 31), (1 << 31) - 1, -(1 << 28), 1 << 28]
    found: dict[str, npt.NDArray[Any]] = {
        "rows": np.sort(rng.integers(0, max(1, n), n)).astype(np.int32), "words": rng.integers(-99, 99, n).astype(np.int32),
        "longs": rng.integers(-3, 3, n).astype(np.int64), "bytes": rng.integers(0, 256, n).astype(np.uint8),
        "pairs": rng.integers(0, 4, (n, 1 + n // 3)).astype(np.int16), "flags": rng.random(n) < 0.1,
        "reals": np.sort(rng.standard_normal(n)).astype(np.float32),
    }  # fmt: skip
    if not tame:
        for name, values in {
            "rows": edges, "words": edges, "longs": [*edges, -(1 << 63), (1 << 63) - 1], "bytes": [0, 255],
            "pairs": [-(1 << 15), (1 << 15) - 1], "reals": [np.nan, np.inf, -np.inf, 3.4e38, 0.0],
        }.items():  # fmt: skip
            at = rng.random(found[name].shape) < 0.06
            found[name][at] = rng.choice(np.array(values, found[name].dtype), int(at.sum()))
    return found


def integer(choose: Choose, depth: int) -> Tree:
    """A tree whose value is an integer."""
    if depth == 0 or choose(range(4)) == 0:
        return choose(
            [("q",), ("kv",), ("q",), ("kv",), ("q_len",), ("h",), ("literal", choose(LITERALS)), ("number", choose(range(4)))]
        )
    what = choose(["int", "int", "int", "//", "%", "load", "load", "where", "abs", ">>"])
    if what == "int":
        return ("int", choose(list(INTS)), integer(choose, depth - 1), integer(choose, depth - 1))
    if what in ("//", "%"):
        by = choose([("literal", choose(DIVISORS)), ("number", choose(range(4)))])
        return (what, integer(choose, depth - 1), by)
    if what == "load":
        return load(choose, depth, ("rows", "words", "longs", "bytes", "pairs"))
    if what == "where":
        return ("where", boolean(choose, depth - 1), integer(choose, depth - 1), integer(choose, depth - 1))
    return (what, integer(choose, depth - 1), ("literal", choose([0, 1, 5, 31])))


def load(choose: Choose, depth: int, names: Sequence[str]) -> Tree:
    name = choose(names)
    indices = [choose([("q",), ("kv",), integer(choose, depth - 1)]) for _ in range(2 if name == "pairs" else 1)]
    return ("load", name, *indices)


def real(choose: Choose, depth: int) -> Tree:
    """A tree whose value is a float."""
    if depth == 0:
        return choose([("load", "reals", ("q",)), ("load", "reals", ("kv",)), ("fraction", choose(range(3)))])
    what = choose(["float", "float", "curve", "cast", "load"])
    if what == "float":
        return ("float", choose(list(FLOATS)), real(choose, depth - 1), real(choose, depth - 1))
    if what == "curve":
        return ("curve", choose(list(CURVES)), real(choose, depth - 1))
    return ("cast", integer(choose, depth - 1)) if what == "cast" else load(choose, depth, ("reals",))


def boolean(choose: Choose, depth: int) -> Tree:
    """A tree whose value is a condition."""
    what = choose(["compare", "compare", "compare", "real", "and", "and", "or", "or", "not", "xor", "flag"])
    if depth <= 0 or what == "compare":
        return ("compare", choose(list(COMPARISONS)), integer(choose, max(0, depth - 1)), integer(choose, max(0, depth - 1)))
    if what == "real":
        return ("compare", choose(["<", "<=", ">"]), real(choose, depth - 1), real(choose, depth - 1))
    if what == "flag":
        return load(choose, depth, ("flags",))
    if what == "not":
        return ("not", boolean(choose, depth - 1))
    return (what, boolean(choose, depth - 1), boolean(choose, depth - 1))


def logit(choose: Choose, depth: int) -> Tree:
    """A tree whose value is a float of moderate size, as of a score. It has no steps but where integers do, so that float32 and
    float64 agree."""
    if depth == 0:
        loads = [("load", "reals", at) for at in (("q",), ("kv",), integer(choose, 1))]
        return choose([("s",), *loads, ("fraction", choose([0, 1])), ("cast", ("%", integer(choose, 1), ("literal", 8)))])
    what, a = choose(["+", "-", "*", "min", "max", "where", "tanh", "exp", "sqrt"]), logit(choose, depth - 1)
    if what == "where":
        return ("where", boolean(choose, 1), a, logit(choose, depth - 1))
    if what in ("*", "tanh"):  # at most 1, and far from where 1 - tanh^2 is a difference of neighbours
        a = ("curve", "tanh", ("float", "/", a, ("cast", ("literal", 64))))
    if what == "tanh":
        return a
    size = ("curve", "abs", a)
    if what in ("exp", "sqrt"):
        return ("curve", what, ("curve", "neg", size) if what == "exp" else ("float", "+", size, ("fraction", 0)))
    return ("float", what, a, logit(choose, depth - 1))


def value(tree: Tree, at: dict[str, Any]) -> Any:
    """A tree's value: of symbols, or of NumPy's arrays."""
    match tree:
        case ("literal", number):
            return number
        case ("number", i):
            return at["numbers"][i]
        case ("fraction", i):
            return at["fractions"][i]
        case ("int", op, a, b):
            return INTS[op](value(a, at), value(b, at))
        case ("float", op, a, b):
            return FLOATS[op](value(a, at), value(b, at))
        case ("curve", op, a):
            return CURVES[op](value(a, at))
        case ("compare", op, a, b):
            return COMPARISONS[op](value(a, at), value(b, at))
        case ("load", name, *indices):
            found = tuple(value(i, at) for i in indices)
            array = at["arrays"][name]
            if isinstance(at["q"], np.ndarray):
                found = tuple(np.clip(i, 0, n - 1) for i, n in zip(found, array.shape, strict=True))
            return array[found]
        case ("cast", a):
            return np.add(value(a, at), np.float32(0.0))
        case ("where", c, a, b):
            return np.where(value(c, at), value(a, at), value(b, at))
        case ("abs", a, _):
            return abs(value(a, at))
        case ("//", a, b):
            return value(a, at) // value(b, at)
        case ("%", a, b):
            return value(a, at) % value(b, at)
        case (">>", a, b):
            return value(a, at) >> value(b, at)
        case ("not", a):
            return np.logical_not(value(a, at))
        case ("and", a, b):
            return np.logical_and(value(a, at), value(b, at))
        case ("or", a, b):
            return np.logical_or(value(a, at), value(b, at))
        case ("xor", a, b):
            return np.logical_xor(value(a, at), value(b, at))
        case (name,):
            return at[name]
    raise AssertionError(tree)


def mask(tree: Tree, captured: dict[str, npt.NDArray[Any]]) -> Any:
    """The tree as a function that captured arrays and numbers."""
    n0, n1, n2, n3 = NUMBERS
    f0, f1, f2 = FRACTIONS

    def f(h: Any, q: Any, kv: Any, q_len: Any) -> Any:
        numbers = {"arrays": captured, "numbers": (n0, n1, n2, n3), "fractions": (f0, f1, f2)}
        return value(tree, {"h": h, "q": q, "kv": kv, "q_len": q_len, **numbers})

    return f


def score(tree: Tree, captured: dict[str, npt.NDArray[Any]]) -> Any:
    """The same of a tree that may read s."""
    n0, n1, n2, n3 = NUMBERS
    f0, f1, f2 = FRACTIONS

    def f(s: Any, h: Any, q: Any, kv: Any, q_len: Any) -> Any:
        numbers = {"arrays": captured, "numbers": (n0, n1, n2, n3), "fractions": (f0, f1, f2)}
        return value(tree, {"s": s, "h": h, "q": q, "kv": kv, "q_len": q_len, **numbers})

    return f


def one_of(which: int, masks: Sequence[Any]) -> Any:
    """The mask of this number, as a function of all of them and of the number: one kernel computes each."""

    def f(h: Any, q: Any, kv: Any, q_len: Any) -> Any:
        kept = False
        for i, each in enumerate(masks):
            kept = kept | ((which == i) & each(h, q, kv, q_len))
        return kept

    return f


def of_all(f: Any) -> Any:
    """A function of any arguments by name as one of all that a mask, or with ``s`` a score, may have."""
    names = tuple(inspect.signature(f).parameters)

    def mask(b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        at = {"b": b, "h": h, "q": q, "kv": kv, "q_len": q_len, "kv_len": kv_len}
        return f(*[at[name] for name in names])

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        at = {"s": s, "b": b, "h": h, "q": q, "kv": kv, "q_len": q_len, "kv_len": kv_len}
        return f(*[at[name] for name in names])

    return score if "s" in names else mask


def one_mask_among(which: int, masks: Sequence[Any]) -> Any:
    """As ``one_of``, of masks of any arguments by name."""
    every = tuple(map(of_all, masks))

    def f(b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        kept = False
        for i, each in enumerate(every):
            kept = kept | ((which == i) & each(b, h, q, kv, q_len, kv_len))
        return kept

    return f


def one_score_among(which: int, scores: Sequence[Any]) -> Any:
    """The same of scores."""
    every = tuple(map(of_all, scores))

    def f(s: Any, b: Any, h: Any, q: Any, kv: Any, q_len: Any, kv_len: Any) -> Any:
        found = s
        for i, each in enumerate(every):
            found = np.where(which == i, each(s, b, h, q, kv, q_len, kv_len), found)
        return found

    return f


def one_score_of(which: int, scores: Sequence[Any]) -> Any:
    """The same of scores."""

    def f(s: Any, h: Any, q: Any, kv: Any, q_len: Any) -> Any:
        found = s
        for i, each in enumerate(scores):
            found = np.where(which == i, each(s, h, q, kv, q_len), found)
        return found

    return f
