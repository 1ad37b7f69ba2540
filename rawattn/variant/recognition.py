"""Functions that say what a built-in option says are that option, and run at its speed.

A condition is taken apart at its "and"s. Each part that bounds kv by q + n, or by q + (kv_len - q_len) + n, is one side of a
causal mask or a window; the rest of n may be anything that is known on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..trace.arithmetic import from_linear, linear
from ..trace.canonical import Code
from ..trace.conditions import parts
from ..trace.evaluation import evaluate
from ..trace.expressions import KV, KV_LEN, Q_LEN, Expr, Q, S, nodes
from .mask import UNBOUNDED, And, Causal, Full, Window
from .score import FLOAT32_MAX, FLOAT32_MIN, Scale, Softcap


class _Side(NamedTuple):
    """kv <= q + shift + reach, or where it is a ``left`` one q + shift - reach <= kv."""

    align: str
    left: bool
    reach: int
    is_fixed: bool  # the reach is compiled in


def recognised(code: Code, numbers: Sequence[Any]) -> Any:
    """The built-in mask or score of the same meaning; None where there is none."""
    return _recognise(code, numbers) if may_be(code) else None


@functools.lru_cache(maxsize=1024)
def may_be(code: Code) -> bool:
    """Says whether the form is one of a built-in option's, whatever the numbers are."""
    root, ones = code.root, (1,) * code.numbers
    if code.role == "score":
        return root is S or root.op == "mul"
    return root.op == "const" or all(_find_sides(part, ones) for part in parts("and", root))


def _recognise(code: Code, numbers: Sequence[Any]) -> Any:
    return (_find_mask if code.role == "mask" else _find_score)(code.root, numbers)


def _evaluate(x: Expr, numbers: Sequence[Any]) -> Any:
    """Returns what an expression of captured numbers alone is; None for others."""
    if x.deps or any(node.op in ("dim", "load") for node in nodes(x)):
        return None
    return evaluate(x, {}, (), numbers).item()


def _find_mask(root: Expr, numbers: Sequence[Any]) -> Any:
    if root.op == "const":
        return Full() if root.args[0] else None
    sides: list[_Side] = []
    for part in parts("and", root):
        bounds = _find_sides(part, numbers)
        if not bounds:
            return None
        sides += bounds
    if len({side.align for side in sides}) > 1 or len({side.left for side in sides}) < len(sides):
        return None
    align = sides[0].align
    left, right = (next((side for side in sides if side.left is which), None) for which in (True, False))
    if any(side is not None and not 0 <= side.reach < UNBOUNDED for side in (left, right)):
        return None
    if right is not None and right.reach == 0 and right.is_fixed:
        causal = Causal(align)
        return causal if left is None else And(causal, Window(left.reach, None, align))
    return Window(None if left is None else left.reach, None if right is None else right.reach, align)


def _find_sides(x: Expr, numbers: Sequence[Any]) -> list[_Side]:
    """The bounds of kv that a condition says; none where it says anything else."""
    if x.op != "le" or any(a.type != "int" for a in x.args):
        return []
    low, high = x.args
    if low.op == "abs":  # |kv - q - shift| <= reach
        right, left = _find_side(low.args[0], high, numbers), _find_side(from_linear(*_negate(low.args[0])), high, numbers)
        return [right, left] if right is not None and left is not None else []
    side = _find_side(low, high, numbers)
    return [] if side is None else [side]


def _negate(x: Expr) -> tuple[int, dict[Expr, int]]:
    constant, terms = linear(x)
    return -constant, {atom: -c for atom, c in terms.items()}


def _find_side(low: Expr, high: Expr, numbers: Sequence[Any]) -> _Side | None:
    """low <= high as a bound of kv by q."""
    (constant, terms), (other, more) = linear(high), linear(low)
    terms, constant = dict(terms), constant - other
    for atom, c in more.items():
        terms[atom] = terms.get(atom, 0) - c
    kv, q, shift, back = (terms.pop(x, 0) for x in (KV, Q, KV_LEN, Q_LEN))
    if abs(kv) != 1 or q != -kv or shift not in (0, q) or back != -shift:
        return None
    rest = from_linear(constant, terms)
    reach = _evaluate(rest, numbers)
    return None if reach is None else _Side("bottom_right" if shift else "top_left", kv == 1, reach, rest.op == "const")


def _find_score(root: Expr, numbers: Sequence[Any]) -> Any:
    if root is S:
        return Scale()
    if root.op != "mul":  # cap * tanh(s / cap)
        return None
    for factor, curve in (root.args, root.args[::-1]):
        if curve.op == "tanh" and curve.args[0].op in ("div", "mul"):
            cap, inner = _evaluate(factor, numbers), _find_factor(curve.args[0], numbers)
            if cap is not None and inner is not None and FLOAT32_MIN <= cap <= FLOAT32_MAX and abs(cap * inner - 1) < 1e-12:
                return Softcap(cap)
    return None


def _find_factor(x: Expr, numbers: Sequence[Any]) -> float | None:
    """The number that s is multiplied by."""
    if x.op == "div" and x.args[0] is S:
        by = _evaluate(x.args[1], numbers)
        return 1 / by if by else None
    if x.op == "mul":
        for a, b in (x.args, x.args[::-1]):
            if a is S:
                return _evaluate(b, numbers)
    return None
