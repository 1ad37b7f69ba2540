"""The proofs about a function before it runs, from sizes alone: that integers fit 32 bits, and which indices stay in their
arrays.

Nothing on the device is read: an element may be any number that its dtype holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ProblemError, brief
from .canonical import Code, number_keys, numbers_of
from .expressions import Expr, Q, nodes
from .ranges import LIMITS, Leaf, Range, anything, bounds, hull, rounded

Class = tuple[int, int] | float | None  # of numbers: the ints from one to another, a float of its own, any other float
FLOAT32_END = 2.0**128 - 2.0**103  # from here on numbers are rounded to infinity
ELEMENT_LIMITS = {"bool": (0, 1), "uint8": (0, 255), "int8": (-128, 127), "int16": (-(1 << 15), (1 << 15) - 1)}


class Limits(NamedTuple):
    """One more than the largest b, h, q and kv that a function sees; the rows of all sequences end to end; and how far below 0 q
    may be."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_rows: int = 0
    kv_rows: int = 0
    q_below: int = 0

    def box(self) -> dict[str, Range]:
        """The ranges of the variables."""
        length = max(self.q_len, self.kv_len)  # of both, where they are parts of longer sequences
        most = {
            "b": self.batch - 1,
            "h": self.heads - 1,
            "q": self.q_len - 1,
            "kv": self.kv_len - 1,
            "q_len": length,
            "kv_len": length,
        }
        most |= {"q_start": self.q_rows, "kv_start": self.kv_rows}
        box = {name: Range(np.int64(0), np.int64(max(0, hi))) for name, hi in most.items()}
        return box | {"q": Range(np.int64(-self.q_below), box["q"].hi)}


def checked_indices(
    code: Code, shapes: tuple[tuple[int, ...], ...], numbers: tuple[int | float, ...], limits: Limits
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """The indices that ``prove`` gives. What holds of larger limits and of a range of numbers holds of these, so limits above are
    tried first, and whatever numbers have as many bits: once for many lengths and numbers."""
    above = _round_up(shapes, limits)
    if _holds_for_all(code, shapes, tuple([_classify(x) for x in numbers]), above):
        return ()
    return _find_checked(code, shapes, number_keys(numbers), limits)


def holds_for(code: Code, shapes: tuple[tuple[int, ...], ...], numbers: tuple[int | float, ...], limits: Limits) -> bool:
    """Says whether no index must be checked. That is known at once for numbers with as many bits as some asked for before."""
    if _holds_below(code, shapes, tuple([_classify(x) for x in numbers]), limits):
        return True
    try:
        return not _find_checked(code, shapes, number_keys(numbers), limits)
    except ProblemError:
        return False


@functools.lru_cache(maxsize=4096)
def _holds_below(code: Code, shapes: tuple[tuple[int, ...], ...], classes: tuple[Class, ...], limits: Limits) -> bool:
    return _holds_for_all(code, shapes, classes, _round_up(shapes, limits))


def _round_up(shapes: tuple[tuple[int, ...], ...], limits: Limits) -> Limits:
    """The limits, rounded up to some that many share: the next size of a captured array, or the next power of two if nearer."""
    sizes = [n for shape in shapes for n in shape]
    return Limits(*[min([1 << (n - 1).bit_length() if n > 0 else 0, *[size for size in sizes if size >= n > 0]]) for n in limits])


def _classify(x: int | float) -> Class:
    """The first and the last integer of the sign of x that have as many bits; None for any float that float32 holds."""
    if not isinstance(x, (int, np.integer)):
        return float(x) if _is_beyond(x) else None
    bits = int(x).bit_length()
    first, last = (1 << bits) >> 1, (1 << bits) - 1
    return (first, last) if x >= 0 else (-last, -first)


@functools.lru_cache(maxsize=4096)
def _holds_for_all(code: Code, shapes: tuple[tuple[int, ...], ...], classes: tuple[Class, ...], limits: Limits) -> bool:
    """Says whether no index may leave its array, and no integer 32 bits, whatever the numbers of these classes are."""
    try:
        return not prove(code, shapes, classes, limits)
    except ProblemError:  # some may be small enough
        return False


@functools.lru_cache(maxsize=4096)
def _find_checked(
    code: Code, shapes: tuple[tuple[int, ...], ...], keys: tuple[int | str, ...], limits: Limits
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    above = _round_up(shapes, limits)
    if above != limits:
        try:
            if not _find_checked(code, shapes, keys, above):
                return ()
        except ProblemError:
            pass  # these may be small enough
    return prove(code, shapes, numbers_of(keys), limits)


def prove(
    code: Code, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any], limits: Limits
) -> tuple[tuple[int, int], ...]:  # fmt: skip
    """The indices that may leave their arrays, which kernels check: the number of the element among the code's nodes, and the
    axis. A number may stand for a class of them: a pair of ints for all between, None for any float of float32.

    Raises ProblemError where an integer may not fit 32 bits, or a finite float not float32, a shift is not by 0 to 31, or a
    captured number divides by 0."""
    is_empty = min(limits[:4]) == 0
    order = nodes(code.root)
    number = {x: i for i, x in enumerate(order)}
    checked: list[tuple[int, int]] = []

    def leaf(x: Expr, operands: Sequence[Range]) -> Range:
        if x.op == "load":
            shape = shapes[x.args[0]]
            if 0 in shape and not is_empty:
                raise ProblemError(f"an array of shape {shape} was captured, which has no element that the function could read.")
            checked.extend(
                (number[x], axis) for axis, (i, n) in enumerate(zip(operands, shape, strict=True)) if i.lo < 0 or i.hi >= n
            )
        return known(x, operands)

    known = _make_leaf(shapes, numbers, limits)
    ranges = bounds(code.root, leaf, _check)
    for x in order:
        _check_operands(x, ranges, any(isinstance(n, tuple) for n in numbers))
    return () if is_empty else tuple(sorted(checked))


def intervals(
    root: Expr, shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any], limits: Limits
) -> dict[Expr, Range]:  # fmt: skip
    """The bounds of all that an expression is made of, over the whole problem."""
    return bounds(root, _make_leaf(shapes, numbers, limits))


def _make_leaf(shapes: Sequence[tuple[int, ...]], numbers: Sequence[Any], limits: Limits) -> Leaf:
    box = limits.box()

    def leaf(x: Expr, operands: Sequence[Range]) -> Range:
        match x.op:
            case "var":
                return box.get(x.args[0], anything("float"))
            case "param":
                return _bound_number(numbers[x.args[0]], x.type)
            case "dim":
                return _bound_int(shapes[x.args[0]][x.args[1]])
        lo, hi = ELEMENT_LIMITS.get(x.args[1], LIMITS[x.type])
        return anything("float") if x.type == "float" else Range(np.int64(lo), np.int64(hi))

    return leaf


def _is_beyond(x: float) -> bool:
    """Says whether a finite number is infinite in float32."""
    return FLOAT32_END <= abs(x) < math.inf


def _check_float(x: float) -> None:
    if _is_beyond(x):
        raise ProblemError(
            f"{x!r} is beyond float32, where kernels would have it infinite; write -inf, or a number up to 3.4e38."
        )


def _bound_number(x: Any, kind: str) -> Range:
    if kind == "float":
        if x is None:
            return anything("float")
        _check_float(float(x))
        return rounded(x)
    return hull(*map(_bound_int, x)) if isinstance(x, tuple) else _bound_int(x)


def _bound_int(x: int) -> Range:
    lo, hi = LIMITS["int"]
    if not lo <= x <= hi:
        raise ProblemError(f"{brief(x)} was captured; an int must fit 32 bits.")
    return Range(np.int64(x), np.int64(x))


def _check(x: Expr, result: Range) -> None:
    lo, hi = LIMITS["int"]
    if x.type == "int" and (result.lo < lo or result.hi > hi):
        _refuse(x, int(result.hi if result.hi > hi else result.lo))


def _refuse(x: Expr, reached: int) -> None:
    raise ProblemError(
        f"{x!r} may reach {reached}, and integers must fit 32 bits; bound what it is made of, as by clip(), or compute it before "
        "and capture an array."
    )


def _check_operands(x: Expr, ranges: dict[Expr, Range], has_classes: bool) -> None:
    """Raises ProblemError if no kernel computes with the operands of x; where numbers are classes, if with some of a class."""
    if x.op == "const" and x.type == "float":
        _check_float(x.args[0])
    if x.op == "lin":  # the terms are added in any order
        reached = abs(x.args[0]) + sum(max(abs(c * int(ranges[atom].lo)), abs(c * int(ranges[atom].hi))) for atom, c in x.args[1])
        if reached > LIMITS["int"][1]:
            _refuse(x, reached)
    if x.op in ("shl", "shr"):
        by = ranges[x.args[1]]
        most = 63 if x.type == "long" else 31
        if by.lo < 0 or by.hi > most:
            raise ProblemError(f"{x!r} may shift by less than 0 or more than {most}; write the shift as n % {most + 1}.")
    if x.op in ("floordiv", "mod"):
        divisor = ranges[x.args[1]]
        is_zero = divisor.lo <= 0 <= divisor.hi if has_classes else divisor.lo == divisor.hi == 0
        if not x.args[1].deps and is_zero:
            raise ProblemError(f"{x!r} divides by 0; give a number that is not.")


def is_nonnegative(root: Expr, q_below: bool) -> bool:
    """Says whether an integer is never negative, whatever is captured: then it is divided as unsigned. ``q_below`` says whether q
    may be below 0."""
    high = LIMITS["int"][1]

    def leaf(x: Expr, operands: Sequence[Range]) -> Range:
        if x.op == "load":
            lo, hi = ELEMENT_LIMITS.get(x.args[1], LIMITS[x.type])
            return anything("float") if x.type == "float" else Range(np.int64(lo), np.int64(hi))
        if x.type == "float":
            return anything("float")
        is_negative = x.op == "param" and x.args[1]
        if x is Q and q_below:
            return Range(np.int64(-high), np.int64(high))
        return Range(np.int64(-high), np.int64(-1)) if is_negative else Range(np.int64(0), np.int64(high))

    return bool(bounds(root, leaf)[root].lo >= 0)
