"""Tracing: the language, what a function captured, refusals, and what is kept."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import fractions
import functools
import gc
import json
import math
import numbers
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from rawattn import trace
from rawattn.errors import ProblemError
from rawattn.trace import gradients, proofs, tracing
from rawattn.trace.canonical import Code
from rawattn.trace.evaluation import evaluate
from rawattn.variant.function import FunctionMask, FunctionScore, option_of
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests.threads import at_once

torch = pytest.importorskip("torch")
DOC = np.array([0, 0, 1, 1, 1, 2, 2, 2], np.int32)
LIMITS = (2, 2, 8, 8)
AT = (1, 1, np.arange(8)[:, None], np.arange(8)[None], 8, 8)


def option(f: Any, role: str = "mask", limits: tuple[int, ...] = LIMITS) -> Any:
    traced, arrays, numbers = trace.bind(f, role)
    return option_of(traced, [(e, x.shape) for (e, _), x in zip(traced.code.arrays, arrays, strict=True)], numbers, limits)


def pairs(f: Any) -> Any:
    """The pairs that a mask keeps, by its definition after tracing."""
    traced, arrays, numbers = trace.bind(f, "mask")
    at = dict(zip(("b", "h", "q", "kv", "q_len", "kv_len"), AT, strict=True)) | {"q_start": 0, "kv_start": 0}
    return np.broadcast_to(evaluate(traced.code.root, at, arrays, numbers, dtype=np.float32), (8, 8))


def logits(f: Any, s: Any) -> Any:
    traced, arrays, numbers = trace.bind(f, "score")
    at = dict(zip(("b", "h", "q", "kv", "q_len", "kv_len"), AT, strict=True))
    return np.broadcast_to(evaluate(traced.code.root, at | {"s": s}, arrays, numbers), (8, 8))


Q, KV = AT[2], AT[3]


class Model:
    def __init__(self, reach: int, table: Any) -> None:
        self.reach, self.table, self.words = reach, table, {"far": 5}

    def within(self, q: Any, kv: Any) -> Any:
        return abs(q - kv) <= self.reach

    def mask(self, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return self.within(q, kv) & (self.table[q] == self.table[kv])

    def __call__(self, q: Any, kv: Any) -> Any:
        return q - kv < self.words["far"]


class Sizes(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Slotted:
    __slots__ = ("reach",)
    reach: int


def by_class(n: Any, t: Any, q: Any, kv: Any) -> Any:
    match n, t:
        case int(), float():
            plain = isinstance(n, int) and type(t) is float and isinstance(t, numbers.Real) and isinstance(int, type)
            return (q >= kv) & (q - kv <= n) if plain and not isinstance(n, float) and isinstance(q > kv, bool) else q > kv
    return q < kv


def by_object(x: Any, own: Any, q: Any, kv: Any) -> Any:
    kept = isinstance(x, np.ndarray) and type(x) is not list and isinstance(own, Slotted) and type(own) is Slotted
    return q - kv <= own.reach if kept else q == kv


def matched(q: Any, kv: Any) -> Any:
    match q, kv:
        case _, 0 | 1:
            return True
        case 0, n if n > 3:
            return True
    return q == kv


def in_sizes(sizes: Sizes, q: Any, kv: Any) -> Any:
    return (kv >= q - sizes.left) & (kv <= q + sizes.right)


def with_default(b: Any, h: Any, q: Any, kv: Any, doc: Any = DOC, *, reach: int = 2) -> Any:
    return (doc[q] == doc[kv]) & (q - kv <= reach)


def of_branches(q: Any, kv: Any) -> Any:
    if kv < 2:
        return True
    for step in range(REACH):
        if q - kv == step:
            return True
    return 3 <= q - kv < 5 or (q == 7 and not kv > 6)


REACH = 2


def factory(doc: Any, reach: Any) -> Any:
    helper = lambda i: doc[i]  # noqa: E731
    return lambda q, kv: (helper(q) == helper(kv)) & (q - kv <= reach)


def all_of(*parts: Any) -> Any:
    return lambda b, h, q, kv: all(f(b, h, q, kv) for f in parts)


BRANCHES = (KV < 2) | (Q - KV == 0) | (Q - KV == 1) | ((Q - KV >= 3) & (Q - KV < 5)) | ((Q == 7) & (KV <= 6))
LANGUAGE: dict[str, tuple[Any, Any]] = {
    "by name": (lambda kv, q: kv <= q, KV <= Q),
    "aliases": (lambda batch, head, q_idx, kv_idx: kv_idx <= q_idx, KV <= Q),
    "by position": (lambda a, b_, i, j: j <= i, KV <= Q),
    "any number": (lambda *at: at[3] <= at[2], KV <= Q),
    "lengths": (lambda q, kv, q_len, kv_len: kv_len - kv > q_len - q - 1, KV <= Q),
    "global rows": (lambda q, kv, q_start, kv_start: q_start + q == kv_start + kv, Q == KV),
    "closure": (factory(DOC, 2), (DOC[Q] == DOC[KV]) & (Q - KV <= 2)),
    "defaults": (with_default, (DOC[Q] == DOC[KV]) & (Q - KV <= 2)),
    "partial": (functools.partial(in_sizes, Sizes(1, 2)), (KV >= Q - 1) & (KV <= Q + 2)),
    "partial of a method": (functools.partial(Model(3, DOC).mask, 0, h=1), (abs(Q - KV) <= 3) & (DOC[Q] == DOC[KV])),
    "method": (Model(1, DOC).mask, (abs(Q - KV) <= 1) & (DOC[Q] == DOC[KV])),
    "object": (Model(1, DOC), Q - KV < 5),
    "attribute of slots": ((lambda own: lambda q, kv: q - kv <= own.reach)(Slotted(2)), Q - KV <= 2),
    "tuple of functions": (
        (lambda parts: lambda b, h, q, kv: all(f(b, h, q, kv) for f in parts))(
            (lambda b, h, q, kv: kv <= q, lambda b, h, q, kv: q < 5)
        ),
        (KV <= Q) & (Q < 5),
    ),
    "branches": (of_branches, BRANCHES),
    "min and max": (lambda q, kv: min(q, kv) + 2 >= max(q, kv), abs(Q - KV) <= 2),
    "in": (lambda q, kv: (q - kv) in (0, 2, 3), (Q == KV) | (Q - KV == 2) | (Q - KV == 3)),
    "divmod": (lambda q, kv: divmod(q, 3)[0] == divmod(kv, 3)[0], Q // 3 == KV // 3),
    "shape": ((lambda x: lambda q, kv: q < x.shape[0] - kv)(DOC), Q < 8 - KV),
    "len": ((lambda x: lambda q, kv: any(x[i] == q - kv for i in range(len(x))))(DOC[2:6]), (Q - KV == 1) | (Q - KV == 2)),
    "last": ((lambda x: lambda q, kv: q - kv <= x[-1])(DOC), Q - KV <= 2),
    "literals from the end": (
        (lambda x: lambda q, kv: (q - kv <= x[-1]) & (kv >= x[torch.tensor(-7)] + sum(x[i] for i in range(-8, -6))))(DOC),
        (Q - KV <= 2) & (KV >= 0),
    ),
    "negative indices that are computed": (
        (lambda x, last: lambda q, kv: (q - kv <= x[q - q - 1]) & (kv >= x[last]) & (kv > x[-9] + x[kv - 9] - 1))(DOC[2:], -1),
        (Q - KV <= 1) & (KV >= 2),
    ),
    "a captured int as a Python int": ((lambda x, last: lambda q, kv: q - kv <= x[int(last)])(DOC, -1), Q - KV <= 2),
    "rows": ((lambda x: lambda b, q, kv: x[b][q] == x[b, kv])(np.stack([DOC[::-1], DOC])), DOC[Q] == DOC[KV]),
    "ellipsis": ((lambda x: lambda q, kv: x[..., q][0] == x[:, kv][0])(DOC[None]), DOC[Q] == DOC[KV]),
    "element": ((lambda x: lambda q, kv: q - kv <= x)(np.array(2)), Q - KV <= 2),
    "a string and a bool": (
        (lambda mode, flip: lambda q, kv: (q - kv <= 1 if mode == "a" else kv > 3) ^ flip)("a", True),
        Q - KV > 1,
    ),
    "torch's functions": (
        (lambda x: lambda q, kv: torch.logical_and(x[q] == x[kv], torch.where(q > 3, kv <= q, True)))(torch.tensor(DOC)),
        (DOC[Q] == DOC[KV]) & ((Q <= 3) | (KV <= Q)),
    ),
    "torch's methods": (lambda q, kv: (q - kv).abs().clamp(max=3).bitwise_and(1).eq(1), np.minimum(abs(Q - KV), 3) % 2 == 1),
    "NumPy's functions": (
        lambda q, kv: np.logical_or(np.abs(q - kv) < 2, np.clip(kv, 2, 3) == kv),
        (abs(Q - KV) < 2) | (KV == 2) | (KV == 3),
    ),
    "integers beyond 32 bits": ((lambda x: lambda q, kv: x[q] == x[kv])(DOC.astype(np.int64) << 40), DOC[Q] == DOC[KV]),
    "a constant made inside": (lambda q, kv: q - kv < torch.tensor(3), Q - KV < 3),
    "zeros": (lambda q, kv: q.new_zeros((), dtype=torch.bool) | (q >= kv), Q >= KV),
    "classes of numbers": ((lambda n, t: lambda q, kv: by_class(n, t, q, kv))(2, 0.5), (Q >= KV) & (Q - KV <= 2)),
    "classes of objects": ((lambda x, own: lambda q, kv: by_object(x, own, q, kv))(DOC, Slotted(2)), Q - KV <= 2),
    "match": (lambda q, kv: matched(q, kv), (KV <= 1) | (Q == KV) | ((Q == 0) & (KV > 3))),
    "unsigned numbers": ((lambda n: lambda q, kv: q - kv <= n)(np.uint8(3)), Q - KV <= 3),
}


@pytest.mark.parametrize("name", LANGUAGE)
def test_language(name: str) -> None:
    f, expected = LANGUAGE[name]
    assert (pairs(f) == expected).all()
    assert (pairs(f) == expected).all(), "once more, from what is kept"


S = np.random.default_rng(0).standard_normal((8, 8))
PLACES, LINE = torch.randint(0, 8, (8, 3), generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
A = PLACES.numpy()
FLOATS: dict[str, tuple[Any, Any]] = {
    "exp": (lambda s: np.exp(s) + torch.exp(s) + s.exp(), 3 * np.exp(S)),
    "powers": (lambda s: s**2 + 2.0**s + abs(s) ** 0.5 + s**3, S**2 + 2**S + abs(S) ** 0.5 + S**3),
    "powers of floats": (
        (lambda n, y: lambda s: s**2.0 + s**n + s**y + s**-1 + torch.pow(s, 12) + np.power(s, -3.0))(5, 3.0),
        S**2 + S**5 + S**3 + 1 / S + S**12 + S**-3,
    ),
    "powers of integers": (
        (lambda n: lambda s, q, kv: s * 0 + q**n + kv**9 % 7 + (-1.0) ** q + q**0.5 + 3**q + torch.float_power(q, 2))(3),
        Q**3 + KV**9 % 7 + (-1.0) ** Q + Q**0.5 + 3.0**Q + Q**2,
    ),
    "powers of 0": ((lambda y: lambda s, q: s + 0.0**q + q**y + (0 * s) ** y)(0.0), S + (Q == 0) + 2),
    "what is near 0": (
        lambda s: np.expm1(s * 1e-12) * 1e12 + torch.log1p(s * 1e-12) * 1e12 + torch.nn.functional.softplus(s - 40) * 1e17,
        2 * S + np.log1p(np.exp(S - 40)) * 1e17,
    ),
    "sigmoid": (lambda s: torch.sigmoid(s) + torch.nn.functional.silu(s), (1 + S) / (1 + np.exp(-S))),
    "softplus": (lambda s: torch.nn.functional.softplus(s), np.log1p(np.exp(S))),
    "gelu": (lambda s: torch.nn.functional.gelu(s), S * (1 + np.vectorize(math.erf)(S / 2**0.5)) / 2),
    "relu": (lambda s: torch.relu(s) - np.maximum(-s, 0), S),
    "logarithms": (lambda s, q: s * np.log1p(q) / torch.log10(q + 2.0), S * np.log1p(Q) / np.log10(Q + 2)),
    "waves": (lambda s, q, kv: s + np.sin(q - kv) * torch.cos(q), S + np.sin(Q - KV) * np.cos(Q)),
    "tangents": (lambda s, q: torch.tan(s) + s.tan() + np.tan(q), 2 * np.tan(S) + np.tan(Q)),
    "leaky relu": (
        lambda s: torch.nn.functional.leaky_relu(s) + torch.nn.functional.leaky_relu(s, 0.5),
        np.where(S > 0, 2 * S, 0.51 * S),
    ),
    "rows": (
        lambda s, q, kv: (
            s + PLACES[q].sum() + torch.sum(2 * PLACES[q]) + np.sum(PLACES[kv] * PLACES[q]) + (PLACES[q] ** 2).mean()
        ),
        S + 3 * A.sum(1)[:, None] + A @ A.T + (A**2).mean(1)[:, None],
    ),
    "ends of rows": (
        lambda s, q, kv: s + PLACES[q].max() + torch.amin(PLACES[kv], 0) + torch.maximum(PLACES[q], kv).prod(),
        S + A.max(1)[:, None] + A.min(1) + np.maximum(A[:, None], np.arange(8)[:, None]).prod(-1),
    ),
    "members of rows": (
        lambda s, q, kv: s + torch.any(PLACES[q] == kv) + (kv != PLACES[q]).all() + any(x == kv for x in PLACES[q]),
        S + (A[:, None] == np.arange(8)[:, None]).any(-1) + 1,
    ),
    "gathered": (
        lambda s, q, kv: s + torch.gather(LINE, 0, kv) + LINE.index_select(0, q) + torch.index_select(LINE, dim=0, index=q),
        S + np.arange(8.0) + 2 * Q,
    ),
    "rounding": (lambda s, q: np.floor(s) + math.floor(q / 2) + torch.ceil(s), np.floor(S) + Q // 2 + np.ceil(S)),
    "rounding to the nearest": (
        lambda s, q: round(s) + np.rint(s * 0 + q / 2) + torch.round(input=s) + round(q) + s.round() + round(s, 0),
        4 * np.round(S) + np.round(Q / 2) + Q,
    ),
    "rounding to 0": (lambda s, q: math.trunc(s) + np.trunc(-s) + torch.fix(2 * s) + math.trunc(q), np.trunc(2 * S) + Q),
    "words": (
        lambda s, q: s.pow(exponent=2) + torch.pow(q, exponent=2) + torch.add(input=s, other=q, alpha=2),
        S**2 + Q**2 + S + 2 * Q,
    ),
    "torch.special": (lambda s: torch.special.expm1(s) + torch.special.log1p(abs(s)), np.expm1(S) + np.log1p(abs(S))),
    "softplus of a beta": (
        (lambda beta: lambda s: torch.nn.functional.softplus(s, beta) + torch.nn.functional.softplus(s, threshold=0.5))(2.0),
        np.log1p(np.exp(2 * S)) / 2 + np.where(S > 0.5, S, np.log1p(np.exp(S))),
    ),
    "sums of exponentials": (lambda s, q: np.logaddexp(s, q) + torch.logaddexp(q, -1e4 - s), np.logaddexp(S, Q) + Q),
    "division": (lambda s, q: s // 0.5 + s % 0.5 + q // 2 + (q / 2).int(), S + np.floor(S / 0.5) * 0.5 + Q // 2 + Q // 2),
    "masked": (lambda s, q, kv: np.where(q >= kv, s, -np.inf), np.where(Q >= KV, S, -np.inf)),
    "captured": ((lambda x, t: lambda s, h, q, kv: s * t + x[h, kv])(torch.ones(2, 8).half(), 0.25), S / 4 + 1),
    "math of numbers": ((lambda n: lambda s: s * math.sqrt(n))(16), S * 4),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str) -> None:
    f, expected = FLOATS[name]
    if name == "division":
        expected = np.floor(S / 0.5) + (S - np.floor(S / 0.5) * 0.5) + Q // 2 + Q // 2
    np.testing.assert_allclose(logits(f, S), expected, rtol=1e-12, atol=1e-12)


def many_ways(q: Any, kv: Any) -> Any:
    return sum(1 if q - kv == i else 0 for i in range(7)) > 0


def endless(q: Any, kv: Any) -> Any:
    while q > kv:
        q = q - 1
    return q == kv


def same_condition(q: Any, kv: Any) -> Any:
    while q > kv:
        pass
    return q == kv


def counts(q: Any, kv: Any, n: int = 5) -> Any:
    i = 0
    while i < n:
        i += 1
    return q >= kv + i


def assigns(q: Any, kv: Any) -> Any:
    STATE.seen = q
    return q >= kv


def of_pattern(x: Any, q: Any) -> Any:
    match x:
        case Model():
            return q > 0
    return q == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sums_of_infinite_exponentials() -> None:
    """As torch has them; and the derivative is a number."""
    ends = np.array([np.inf, -np.inf, np.nan, 0.0])
    traced, arrays, _ = trace.bind((lambda x: lambda s, kv: np.logaddexp(s, x[kv]))(ends), "score")
    s, at = torch.tensor(np.repeat(ends[:, None], 4, 1)), torch.tensor(ends)[None]
    found = evaluate(traced.code.root, {"s": s.numpy(), "kv": np.arange(4)[None]}, arrays)
    np.testing.assert_array_equal(found, torch.logaddexp(s, at).numpy())
    slope = evaluate(gradients.slope(traced.code.root), {"s": s.numpy(), "kv": np.arange(4)[None]}, arrays)
    assert np.isfinite(slope[:2, :2]).all()


STATE = Model(1, DOC)
BIG = np.zeros((8, 8), np.float32)
REFUSED: dict[str, tuple[Any, str, str]] = {
    "no function": (3, "mask", "must be a Python function"),
    "a class": (Model, "mask", "must be a Python function|cannot be traced"),
    "names": (lambda x, y: x, "mask", r"takes \(x, y\).*any of b, h, q, kv.*\(b, h, q, kv\) in this order"),
    "s in a mask": (lambda s, q: q > 0, "mask", "takes s, which a mask does not see"),
    "a float": (lambda q, kv: q * 1.0, "mask", "gives a float.*compare"),
    "a bool": (lambda s, q: q > 0, "score", "gives a bool.*mask="),
    "nothing": (lambda q, kv: None, "mask", "None, as a function without return"),
    "an array": (lambda q, kv: BIG, "mask", "stands where a number is needed; index the array"),
    "a row": (lambda q, kv: BIG[q] > 0, "mask", "whole array|stands where a number|unsupported|cannot be traced"),
    "a product of rows": (lambda s, q, kv: s + torch.dot(torch.ones(8), ROWS[q]), "score", "concatenate along head_dim"),
    "rows": (lambda s, q: s + PLACES[q], "score", "a Row stands where a number is needed; index the array"),
    "the truth of a row": (
        lambda q, kv: q > kv if PLACES[q] else False,
        "mask",
        r"a row stands where.*a bool; write .any\(\) or",
    ),
    "rows that do not fit": (lambda s, q: s + (PLACES[q] + ROWS[q]).sum(), "score", "rows of 3 and 4 elements meet"),
    "a long row": (
        lambda s, q: s + np.zeros(1).sum() + LONG[q].sum(),
        "score",
        "LONG stands where .* row of at most 64 elements",
    ),
    "where a row is largest": (lambda s, q: s + PLACES[q].max(0), "score", "a Row stands where"),
    "gathered rows": (lambda s, q: s + torch.gather(PLACES, 0, q), "score", "gather or index_select of PLACES, whole or several"),
    "a torch.autograd.Function": (
        lambda s: Own.apply(s),
        "score",
        "of a torch.autograd.Function, whose backward is not followed",
    ),
    "a method of an array": (lambda q, kv: BIG.sum() > 0, "mask", r"BIG.sum of a whole array; compute it before"),
    "too many indices": (lambda q, kv: DOC[q, kv] > 0, "mask", "DOC has 1 dimensions and is given more indices"),
    "an index of an element": (lambda q, kv: DOC[q][kv] > 0, "mask", "a number was indexed"),
    "a slice": (lambda q, kv: DOC[q : q + 2] == 0, "mask", "indexed by slice"),
    "an index that is a float": (lambda q, kv: DOC[q / 2] > 0, "mask", r"indexed by a float.*//"),
    "an index that is a bool": (lambda q, kv: DOC[q > kv] > 0, "mask", "indexed by a bool"),
    "a loop over queries": (
        lambda q, kv: any(i == kv for i in range(q)),
        "mask",
        "depends on q stands where Python needs an int",
    ),
    "a list": (lambda q, kv: [1, 2, 3][kv] == 1, "mask", "depends on kv stands where Python needs an int"),
    "math": (lambda s: math.exp(s), "score", r"np.exp\(x\) or torch.exp\(x\), not math.exp"),
    "an unknown function": (lambda s: np.sinc(s), "score", "cannot be traced|not known"),
    "an unknown ufunc": (lambda s: np.arctan(s), "score", r"arctan\(\) is not known of single elements"),
    "many ways": (many_ways, "mask", "more than 64 ways"),
    "a loop on a position": (endless, "mask", "more than 64 ways.*`while q > kv`, cannot be followed: write"),
    "a loop without an end": (same_condition, "mask", "asks more than 10,000 times.*cannot be followed: write"),
    "a loop on a number": (counts, "mask", r"A loop over a captured number n is `for i in range\(n\)`"),
    "an assignment": (assigns, "mask", "STATE.seen is assigned to"),
    "a set": ((lambda x: lambda q, kv: q in x)({1, 2}), "mask", "whose members cannot be followed"),
    "a set in it": (lambda q, kv: kv in {0, 1}, "mask", r"kv is a key of a set or a dict.*write `x in \(0, 1\)`"),
    "a dict in it": (lambda q, kv: {0: 2}.get(kv, 1) > q, "mask", "kv is a key of a set or a dict"),
    "a number as a key": ((lambda n: lambda q, kv: (n in {1, 2}) & (q > kv))(2), "mask", "a captured number is a key of a set"),
    "a string of a number": ((lambda n: lambda q, kv: q > kv if str(n) == "2" else q < kv)(2), "mask", r"print repr\(x\)"),
    "a format of a number": ((lambda n: lambda q, kv: q > kv if f"{n}" == "2" else q < kv)(2), "mask", "is made a string"),
    "a power of integers": (lambda q, kv: q**kv > 5, "mask", "an integer to the power of .*captured int; convert one of both by"),
    "a power of an element": (lambda q, kv: q ** DOC[0] > 5, "mask", "an integer to the power of an integer that is neither"),
    "a fraction": ((lambda x: lambda s: s * x)(fractions.Fraction(1, 3)), "score", "a Fraction stands where.*give an int or"),
    "a format": (
        (lambda x: lambda q, kv: x[q] == x[kv])(np.zeros(8, complex)),
        "mask",
        "x holds complex128; its dtype must be one of",
    ),
    "an error": (lambda q, kv: q.nothing, "mask", "cannot be traced: AttributeError"),
    "iteration": (lambda q, kv: sum(x for x in q) > 0, "mask", "iterated over"),
    "~ of a float": (lambda s: ~s, "score", "~ of a float"),
    "bits of floats": (lambda s: s << 2, "score", "shl of a float"),
    "rounding": (lambda s: torch.div(s, 2, rounding_mode="trunc"), "score", "rounding_mode"),
    "rounding to digits": (lambda s: round(s, 2), "score", r"write round\(x \* 100\) / 100"),
    "a modulus": (lambda q, kv: pow(q, 2, 5) == kv, "mask", r"three operands.*write x \*\* n % m"),
    "a large power": (lambda q, kv: q**2000 > kv, "mask", "an integer to the power of 2000; as a product it has at most 1,024"),
    "a word that is not known": (lambda s: np.exp(s, dtype=float), "score", r"exp\(\) is given dtype, which is not known"),
    "too many operands": (lambda s: s.exp(1, 2), "score", r"exp\(\) is given 3 operands, which is not known"),
    "a pattern": (lambda q, kv: of_pattern(STATE, q), "mask", r"a class of yours is no pattern; write isinstance\(x, C\)"),
}
ROWS, LONG = torch.zeros(8, 4), np.zeros((8, 65))


class Own(torch.autograd.Function):
    """A function with a derivative of its own."""


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    f, role, words = REFUSED[name]
    with pytest.raises(ProblemError, match=words):
        trace.bind(f, role)


@pytest.mark.parametrize(
    ("f", "limits", "words"),
    [
        (lambda q, kv: q * kv >= 0, (1, 1, 1 << 20, 1 << 20), r"imul\(.*may reach \d+, and integers must fit 32 bits"),
        (lambda q, kv: 100000 * q - kv > 5, (1, 1, 1 << 20, 1), "may reach"),
        (lambda q, kv: q * kv < (1 << 40), LIMITS, "may reach"),
        (lambda q, kv: (DOC[q] >> (kv - q)) > 0, LIMITS, "write the shift as n % 32"),
        ((lambda n: lambda q, kv: q // n == kv // n)(0), LIMITS, "divides by 0"),
        ((lambda n: lambda q, kv: q - kv < n)(1 << 40), LIMITS, "an int must fit 32 bits"),
        ((lambda x: lambda q, kv: x[q] > 0)(np.zeros(0, np.int32)), LIMITS, r"shape \(0,\)"),
        ((lambda x: lambda q, kv: x[q] > 0)(np.zeros(8)), LIMITS, "captured an array of float64"),
    ],
    ids=range(8),
)  # fmt: skip
def test_refused_of_a_problem(f: Any, limits: tuple[int, ...], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        option(f, limits=limits)


@pytest.mark.parametrize("low", [-1e300, torch.finfo(torch.float64).min, 1e39])
def test_floats_beyond_float32(low: float) -> None:
    """Written in the function, or captured, whatever came before: kernels would have them infinite."""
    score = lambda x: lambda s, q, kv: np.where(q >= kv, s + q, x)  # noqa: E731
    for fits in (float("-inf"), 3.4e38, torch.finfo(torch.float32).min, float("nan")):
        assert option(score(fits), "score").numbers[0] is not None
        with pytest.raises(ProblemError, match=r"e\+\d+ is beyond float32, where kernels would have it infinite; write -inf"):
            option(score(low), "score")
    for role in ("mask", "score"):
        with pytest.raises(ProblemError, match="is beyond float32"):
            option((lambda q: q * 1.0 > -1e300) if role == "mask" else (lambda s, q: np.where(q > 2, s, -1e300)), role)


def test_what_fits_is_not_refused() -> None:
    assert isinstance(option(lambda q, kv: q * kv >= 4, limits=(1, 1, 1 << 15, 1 << 15)), FunctionMask)
    assert isinstance(option(lambda q, kv: abs(2 * DOC[q] - kv) < 4, limits=(1, 1, 1 << 28, 1 << 28)), FunctionMask)
    assert isinstance(option((lambda x: lambda q, kv: x[q] > 0)(np.zeros(0, np.int32)), limits=(1, 1, 0, 5)), FunctionMask)


@pytest.mark.parametrize(
    ("f", "limits", "checked"),
    [
        (lambda q, kv: DOC[q] == DOC[kv], LIMITS, 0),
        (lambda q, kv: DOC[q] == DOC[kv], (1, 1, 9, 8), 1),
        (lambda q, kv: DOC[q] == DOC[kv - 1], LIMITS, 1),
        (lambda q, kv: DOC[np.clip(kv - q, 0, 7)] == 1, LIMITS, 0),
        (lambda q, kv: DOC[np.clip(kv - q, 0, DOC.shape[0])] == 1, (1, 1, 8, 20), 1),
        (lambda q, kv: DOC[np.clip(kv - q, 0, DOC.shape[0] - 1)] == 1, LIMITS, 0),
        (lambda q, kv: DOC[DOC[q]] == kv, LIMITS, 1),
        (lambda q, kv: DOC[DOC[q] % 8] == kv, LIMITS, 0),
        (lambda q, kv: (q // 2 < 1) & (DOC[q // 2 * 2] == kv), LIMITS, 0),
    ],
    ids=range(9),
)  # fmt: skip
def test_what_is_checked(f: Any, limits: tuple[int, ...], checked: int) -> None:
    assert len(option(f, limits=limits).checked) == checked


def test_what_is_proved_of_each_input() -> None:
    """At the last value that fits, and the first that does not: of positions, heads, formats and captured numbers."""
    heads, table = np.zeros(3, np.int32), np.zeros(8, np.int32)
    for count, checked in ((3, 0), (4, 1)):
        assert len(option(lambda h, q: heads[h] > q, limits=(2, count, 8, 8)).checked) == checked
        assert len(option(lambda b, q: heads[b] > q, limits=(count, 2, 8, 8)).checked) == checked
    most = (1 << 31) - 1
    for dtype, fits, larger in (
        (np.int16, 65535, 65537), (np.int8, (1 << 24) - 1, (1 << 24) + 1), (np.uint8, most // 255, most // 255 + 1),
        (bool, most - 16, most),
    ):  # fmt: skip
        x = np.zeros(8, dtype)
        option(lambda q, kv, x=x, factor=fits: as_int(x[q]) * factor + 1 >= kv)
        with pytest.raises(ProblemError, match="may reach"):
            option(lambda q, kv, x=x, factor=larger: as_int(x[q]) * factor + 1 >= kv)
    for n, index in (((1 << 31) - 1, 0), (-(1 << 31), 0), (1 << 31, 1), (-(1 << 31) - 1, 1)):
        mask = lambda q, kv, n=n: (table[q] <= n) & (kv % 2 == 0)  # noqa: E731
        if index:
            with pytest.raises(ProblemError, match=f"{n} was captured; an int must fit 32 bits"):
                option(mask)
        else:
            assert option(mask).numbers == (n,)


def as_int(x: Any) -> Any:
    return x.int() if hasattr(x, "int") else np.int64(x)


def test_a_number_is_proved_whatever_came_before() -> None:
    """One proof holds for a class of numbers, and for no other: an index that leaves its array, an overflow, a division by 0, and
    an index that is clipped once and not again."""
    table = np.zeros(70, np.int32)
    at = lambda n: lambda q, kv: table[q + n] <= kv  # noqa: E731
    divided = lambda n: lambda q, kv: (q + 1) // n < table[kv]  # noqa: E731
    product = lambda n: lambda q, kv: q * n < table[kv]  # noqa: E731
    within = lambda n: lambda q, kv: q // (n - 5) + q % (n - 6) < table[kv]  # noqa: E731
    for _ in range(2):
        for n in (4, 5, 6, 7, 12):
            if n in (5, 6):
                with pytest.raises(ProblemError, match="divides by 0"):
                    option(within(n))
            else:
                assert option(within(n)).numbers == (n,)
        for n, checked in ((0, 0), (40, 0), (62, 0), (63, 1), (64, 1), (-1, 1), (33, 0), (1 << 30, 1)):
            assert len(option(at(n)).checked) == checked, n
        for n in (1, -1, 2, 0, 3):
            if n:
                assert option(divided(n)).numbers == (n,)
            else:
                with pytest.raises(ProblemError, match="divides by 0"):
                    option(divided(n))
        for n in (5, (1 << 31) // 7, (1 << 31) // 7 + 1, 1 << 29, 6):
            if n * 7 < 1 << 31:
                assert option(product(n)).numbers == (n,)
            else:
                with pytest.raises(ProblemError, match="may reach"):
                    option(product(n))
    assert proofs._classify(0) == (0, 0) and proofs._classify(5) == (4, 7) and proofs._classify(-5) == (-7, -4)
    assert proofs._classify(1) == (1, 1) and proofs._classify(0.0) is None
    assert proofs._round_up(((70,), (3, 900)), proofs.Limits(0, 3, 8, 800)) == (0, 3, 8, 900, 0, 0, 0)
    assert proofs._round_up((), proofs.Limits(1, 3, 9, 64)) == (1, 4, 16, 64, 0, 0, 0)


def test_what_is_known_of_conditions() -> None:
    """Without a kernel: what holds of every pair, or of none; and the opposite of bits."""
    for f, known in (
        (lambda q, kv: q + kv == -1, False), (lambda q, kv: q + kv + 1 == 0, False), (lambda q, kv: q + kv >= 0, True),
        (lambda q, kv: q + 1 <= 0, False), (lambda q, kv, q_len: q < q_len, True), (lambda q, kv, kv_len: kv == kv_len, False),
    ):  # fmt: skip
        assert (root := trace.trace(f, "mask").code.root).op == "const" and root.args[0] is known
    for f in (lambda q, kv: ~(q + kv) == -3, lambda q, kv: ~(DOC[q] & 1) + kv == 2):
        q, kv = AT[2:4]
        assert np.array_equal(pairs(f), np.broadcast_to(f(q, kv), (8, 8)))


@pytest.mark.parametrize("there", [8, 1.5, DOC], ids=["int", "float", "array"])
def test_what_is_looked_at_and_not_read_is_followed(there: Any) -> None:
    def make(x: Any) -> Any:
        return lambda q, kv: q >= kv if x is None else q < kv

    for given in (there, None, there):
        q, kv = AT[2:4]
        assert np.array_equal(pairs(make(given)), q >= kv if given is None else q < kv)


RECOGNISED: dict[str, tuple[Any, Any]] = {
    "full": (lambda q, kv: True, Full()),
    "all keys": (lambda q, kv, kv_len, q_len: (kv < kv_len) & (q < q_len) & (kv >= 0), Full()),
    "causal": (lambda b, h, q, kv: q >= kv, Causal("top_left")),
    "causal, turned": (lambda b, h, q, kv: ~(kv > q), Causal("top_left")),
    "causal, strict": (lambda b, h, q, kv: kv < q + 1, Causal("top_left")),
    "bottom right": (lambda q, kv, q_len, kv_len: kv <= q + (kv_len - q_len), Causal()),
    "bottom right, from the end": (lambda q, kv, q_len, kv_len: kv_len - kv >= q_len - q, Causal()),
    "window": (lambda q, kv: abs(q - kv) <= 5, Window(5, 5, "top_left")),
    "window of a number": ((lambda w: lambda q, kv: (kv - q <= w) & (q - kv < w))(7), Window(6, 7, "top_left")),
    "window, in a chain": (lambda q, kv: -3 <= kv - q <= 2, Window(3, 2, "top_left")),
    "window, bottom right": (lambda q, kv, q_len, kv_len: abs(q + kv_len - q_len - kv) < 4, Window(3, 3)),
    "to the left": (lambda q, kv: q - kv <= 9, Window(9, None, "top_left")),
    "both": ((lambda w: lambda q, kv: (q >= kv) & (q - kv <= w))(9), And(Causal("top_left"), Window(9, None, "top_left"))),
    "both, if": (lambda q, kv: q - kv < 4 if q >= kv else False, And(Causal("top_left"), Window(3, None, "top_left"))),
    "in half windows": ((lambda w: lambda q, kv: abs(q - kv) <= w // 2)(11), Window(5, 5, "top_left")),
    "two ends": (lambda q, kv: (kv <= q) & (kv <= q + 3), None),
    "two alignments": (lambda q, kv, q_len, kv_len: (kv <= q) & (q + kv_len - q_len - kv <= 3), None),
    "a window that is none": ((lambda w: lambda q, kv: abs(q - kv) <= w)(-1), None),
    "before the query": (lambda q, kv: kv < q, None),
    "of the keys alone": (lambda q, kv: kv <= 5, None),
    "twice the query": (lambda q, kv: kv <= 2 * q, None),
    "all but the last key": (lambda kv, kv_len: kv < kv_len - 1, None),
    "a length without the other": (lambda q, kv, kv_len: kv >= q + kv_len - 5, None),
    "all but the first query": (lambda q, kv: q > 0, None),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_recognised(name: str) -> None:
    f, expected = RECOGNISED[name]
    found = option(f)
    assert isinstance(found, FunctionMask) if expected is None else found == expected
    if expected is not None:
        for n, m in ((8, 8), (5, 8), (8, 3)):
            at = {"b": 0, "h": 0, "q": np.arange(n)[:, None], "kv": np.arange(m)[None], "q_len": n, "kv_len": m}
            traced, arrays, numbers = trace.bind(f, "mask")
            begin, end = found.interval(np.arange(n), n, m)
            kept = np.broadcast_to(evaluate(traced.code.root, at, arrays, numbers), (n, m))
            assert (kept == ((np.arange(m) >= begin[:, None]) & (np.arange(m) < end[:, None]))).all()


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda s: s, Scale()),
        (lambda s, b, h, q, kv: 1.0 * s + 0.0, Scale()),
        (lambda s: 30.0 * torch.tanh(s / 30.0), Softcap(30.0)),
        ((lambda cap: lambda s: torch.tanh(s / cap) * cap)(12.5), Softcap(12.5)),
        ((lambda cap: lambda s: np.tanh(s * (1 / cap)) * cap)(12.5), Softcap(12.5)),
        (lambda s: 30.0 * torch.tanh(s / 20.0), None),
        (lambda s: -30.0 * torch.tanh(s / -30.0), None),
        (lambda s: 2 * s, None),
    ],
    ids=range(8),
)  # fmt: skip
def test_recognised_score(f: Any, expected: Any) -> None:
    found = option(f, "score")
    assert isinstance(found, FunctionScore) if expected is None else found == expected


TABLE, PAIRS = np.zeros(64, np.float32), np.zeros((8, 8), np.float32)
DIAGONALS: list[tuple[Any, bool]] = [
    (lambda s, q, kv: s + TABLE[kv - q + 20], True),
    (lambda s, q, kv: s * TABLE[TABLE[abs(q - kv)].int()], True),
    (lambda s, q, kv: TABLE[2 * q - 2 * kv], True),
    (lambda s, q, kv, kv_len: np.tanh(s - np.log(kv_len + abs(kv - q))), True),
    (lambda s, q, kv: s - 0.5 * abs(kv - q), True),
    (lambda s, q, kv: s + TABLE[np.where(kv > q, 8, 0) + np.minimum(abs(kv - q), 7)], True),
    (lambda s, q, kv: s + TABLE[np.where(kv > 2 * q, 8, 0) + np.minimum(abs(kv - q), 7)], False),
    (lambda s, q, kv: s + 0.5 * (kv - q), False),  # a multiply-add by a constant
    (lambda s, q, kv: s + np.where(kv > q, 0.5, 0.0), False),  # too little
    (lambda s, q, kv: np.where(TABLE[kv - q] > 0, s, -s), False),  # no float
    (lambda s, q, kv: s + TABLE[2 * kv - q], False),
    (lambda s, q, kv: s + TABLE[kv - q // 2], False),
    (lambda s, q, kv: s + TABLE[kv] + TABLE[q], False),
    (lambda s, q, kv: s + TABLE[kv - q + TABLE[q].int()], False),
    (lambda s, q, kv: s + TABLE[kv - q + s.int()], False),
    (lambda s, q, kv: s + TABLE[kv - q] + PAIRS[q, kv], False),  # elements of pairs have a way of their own
    (lambda s, q, kv: s * TABLE[kv - q] + TABLE[q - kv], False),  # two parts
]


@pytest.mark.parametrize("place", range(len(DIAGONALS)))
def test_what_pairs_of_a_diagonal_share(place: int) -> None:
    f, expected = DIAGONALS[place]
    assert option(f, "score").has_diagonals == expected


def test_equal_functions_are_one_kernel() -> None:
    doc, other, bias = DOC, DOC.copy(), np.zeros((2, 8), np.float32)
    same: list[Callable[..., Any]] = [
        lambda b, h, q, kv: (doc[q] == doc[kv]) & (q >= kv) & (q - kv <= 3),
        lambda b, h, q, kv: (q - kv < 4) & (kv <= q) & (doc[kv] == doc[q]),
        (lambda unused, z: lambda q_idx, kv_idx: (z[q_idx] == z[kv_idx]) & (0 <= q_idx - kv_idx <= 3))(bias, other),
    ]
    assert len({option(f).kind for f in same}) == 1
    two = [
        lambda q, kv: (doc[q] == doc[kv]) & (other[q] < kv),
        (lambda doc, a: lambda q, kv: (doc[q] < kv) & (a[kv] == a[q]))(other, doc),
    ]
    assert len({option(f).kind for f in two}) == 1, "arrays are numbered by their use"
    scores = [lambda s, h, kv: s + bias[h, kv], lambda kv, s, h: bias[h, kv] + s, lambda s, b, h, q, kv: s - -bias[h][kv]]
    assert len({option(f, "score").kind for f in scores[:2]}) == 1
    different = [same[0], lambda q, kv: doc[q] == other[kv], lambda q, kv: doc[q] <= doc[kv]]
    different += [(lambda x: lambda q, kv: x[q] == x[kv])(DOC.astype(np.int16))]
    assert len({option(f).kind for f in different}) == 4


def test_values_are_no_part_of_a_kind() -> None:
    def make(doc: Any, n: int) -> Any:
        return lambda q, kv: (doc[q] == doc[kv]) & (kv % n == 1)

    options = [option(make(DOC + n, n)) for n in (2, 3, 5)]
    assert len({o.kind for o in options}) == 1 and len(set(options)) == 3
    assert [o.values["mask_number_0"] for o in options] == [2, 3, 5]
    negative = option(make(DOC, -2))
    assert negative.kind != options[0].kind, "of numbers >= 0 divisions are simpler"


CODE = """
import sys
import numpy as np
from rawattn import trace
from rawattn.variant.function import option_of
for i in range(int(sys.argv[1])):
    trace.trace(eval(f"lambda q, kv: (q // {i + 2} == kv // {i + 3}) | (kv < {i})"), "mask")
doc, start, w = np.zeros(9, np.int32), np.zeros(9, np.int32), 4
f = lambda b, h, q, kv: ((doc[q] == doc[kv]) & (q - kv <= w) | (kv < start[doc[q]])) & (kv % 3 + q % 5 != 2)
t = trace.trace(f, "mask")
o = option_of(t, [("int32", (9,)), ("int32", (9,))], (4,), (1, 1, 9, 9))
print(t.code, o.kind, list(o.texts.values()), [x[:2] for x in o.fields])
"""


def test_kinds_are_the_same_in_every_process() -> None:
    """Kernels are kept by their text: it does not depend on what was traced before, nor on the order of sets."""
    found = []
    for seed, before in (("0", "0"), ("1", "7"), ("2", "20")):
        ran = subprocess.run(
            [sys.executable, "-c", CODE, before], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        found.append(ran.stdout)
    assert len(set(found)) == 1 and len(found[0]) > 1000


def test_the_same_code_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(doc: Any, reach: Any) -> Any:
        return lambda q, kv: (doc[q] == doc[kv]) & (q - kv <= reach)

    first = trace.bind(make(DOC, 1), "mask")
    monkeypatch.setattr(tracing, "_trace_anew", lambda *given: pytest.fail("it is traced again"))
    new = DOC.copy()
    traced, arrays, numbers = trace.bind(make(new, 2), "mask")
    assert traced is first.traced and arrays[0] is new and numbers == (2,)
    assert first.traced.bind(make(new, np.int64(3))) == ((new,), (3,))


def test_another_kind_of_value_is_traced_anew() -> None:
    def make(doc: Any, reach: Any, flag: Any = True, steps: Any = (1, 2)) -> Any:
        def mask(q: Any, kv: Any) -> Any:
            kept = doc[q] == doc[kv] if flag else doc[q] < doc[kv]
            return kept & (q - kv <= reach * sum(steps))

        return mask

    given = [make(DOC, 1), make(DOC, -1), make(DOC, 1.0), make(DOC.astype(np.int64), 1), make(torch.tensor(DOC), 1)]
    given += [make(DOC, 1, False), make(DOC, 1, True, (1, 2, 3)), make(DOC, 1)]
    codes = [trace.trace(f, "mask").code for f in given]
    assert codes[0] == codes[-1] == codes[4] and len(set(codes)) == 6
    shared, other = DOC.copy(), DOC[::-1].copy()
    pair = (lambda: lambda a, b_: lambda q, kv: a[q] == b_[kv])()
    assert trace.trace(pair(shared, shared), "mask").labels == ("a",)
    _, arrays, _ = trace.bind(pair(shared, other), "mask")
    assert len(arrays) == 2 and arrays[0] is not arrays[1], "the two were one array before"


def test_values_that_are_compiled_in() -> None:
    def make(count: int) -> Any:
        return lambda q, kv: any(q - kv == i for i in range(count))

    for count in (2, 4, 2):
        assert (pairs(make(count)) == (Q - KV >= 0) & (count > Q - KV)).all()
    words = {"far": 3}
    mask = Model(1, DOC)
    mask.words = words
    assert (pairs(mask) == (Q - KV < 3)).all()
    words["far"] = 6
    assert (pairs(mask) == (Q - KV < 6)).all(), "an item is a number, and followed"


def test_which_exponents_are_compiled_in() -> None:
    """An int makes products, whose base may be an integer; a float, and the exponent of a positive literal, compile nothing."""
    for f, count in (
        (lambda n: lambda s, q: s + q**n, 3),
        (lambda n: lambda s: s + 2**n, 1),
        (lambda n: lambda s: s ** (n / 2), 1),
    ):
        assert len({trace.trace(f(n), "score").code for n in (2, 3, 4)}) == count
        for n in (2, 3, 4):
            np.testing.assert_allclose(logits(f(n), abs(S)), np.broadcast_to(on_arrays(f(n), abs(S)), (8, 8)))


def on_arrays(f: Any, s: Any) -> Any:
    return f(s, Q) if f.__code__.co_argcount == 2 else f(s)


def test_globals_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (pairs(of_branches) == BRANCHES).all()
    monkeypatch.setitem(globals(), "REACH", 3)
    assert (pairs(of_branches) == BRANCHES | (Q - KV == 2)).all()


def test_no_array_is_kept() -> None:
    class Owned(np.ndarray):
        pass

    def make(doc: Any) -> Any:
        return lambda q, kv: doc[q] == doc[kv]

    array = DOC.copy().view(Owned)
    f = make(array)
    alive = weakref.ref(array)
    option(f)
    trace.bind(f, "mask")
    del array, f
    gc.collect()
    assert alive() is None


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tracing._Cache()
    monkeypatch.setattr(tracing, "_cache", cache)
    monkeypatch.setattr(tracing._Cache, "codes", 8)
    monkeypatch.setattr(tracing._Cache, "variants", 3)
    for i in range(20):
        trace.bind(eval(f"lambda q, kv: q % {i + 2} == kv"), "mask")
    assert len(cache._traced) == 8
    f = (lambda: lambda n: lambda q, kv: any(q == i for i in range(n)))()
    for i in range(10):
        trace.bind(f(i + 1), "mask")
    assert max(len(found) for found in cache._traced.values()) == 3


def test_many_threads() -> None:
    def make(doc: Any, n: int) -> Any:
        return lambda q, kv: (doc[q] == doc[kv]) & (kv < 3 if q > n else kv >= q % 3)

    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            doc, n = rng.integers(0, 3, 8).astype(np.int32), int(rng.integers(0, 8))
            expected = (doc[Q] == doc[KV]) & np.where(n < Q, KV < 3, KV >= Q % 3)
            if not (pairs(make(doc, n)) == expected).all():
                wrong.append((doc, n))

    at_once(work, [(seed,) for seed in range(8)])
    assert not wrong


def test_json() -> None:
    def make(doc: Any) -> Any:
        return lambda q, kv: (doc[q] == doc[kv]) & (np.exp(0.5 * (q - kv)) < float("inf"))

    traced, _, numbers = trace.bind(make(DOC), "mask")
    again = type(traced).from_text(traced.text)
    assert again == traced and hash(again) == hash(traced) and again.labels == ("doc",)
    forms = [("int32", DOC.shape)]
    assert option_of(again, forms, numbers, LIMITS) == option_of(traced, forms, numbers, LIMITS)
    fields = json.loads(json.dumps(dataclasses.asdict(option_of(traced, forms, numbers, LIMITS))))
    assert FunctionMask(**fields) == option_of(traced, forms, numbers, LIMITS)


@pytest.mark.parametrize(
    "text",
    ["", "[]", '["mask"]', '["mask",["system","int","x"]]', '["mask",["var","int","q; }"]]', '["mask",["not","bool","$5"]]',
     '["other",["var","int","q"]]', '["mask",["load","int",0,"evil*","$0"]]'],
)  # fmt: skip
def test_code_of_a_file_is_checked(text: str) -> None:
    with pytest.raises(ProblemError, match="the text of a traced function"):
        _ = Code(text).root


class Holder:
    """An object with what is set on it."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Optional:
    def __call__(self, q: Any, kv: Any) -> Any:
        reach = getattr(self, "reach", None)
        return q >= kv if reach is None else (q >= kv) & (q - kv < reach)


class Hasty:
    def __call__(self, q: Any, kv: Any) -> Any:
        return (q >= kv) & (q - kv < self.reach) if hasattr(self, "reach") else q >= kv


@pytest.mark.parametrize("kind", [Optional, Hasty])
def test_an_attribute_that_comes_later(kind: Any) -> None:
    mask = kind()
    assert (pairs(mask) == (Q >= KV)).all()
    mask.reach = 2
    assert (pairs(mask) == ((Q >= KV) & (Q - KV < 2))).all()
    del mask.reach
    assert (pairs(mask) == (Q >= KV)).all()


def test_an_item_that_comes_later() -> None:
    many = [0] * 299 + [1]

    def loop(q: Any, kv: Any) -> Any:
        total = 0
        for x in many:
            total = total + x
        return q - kv < total

    def by_length(q: Any, kv: Any) -> Any:
        return q - kv < len(many) - 299

    def caught(q: Any, kv: Any) -> Any:
        try:
            return q - kv < words["reach"]
        except KeyError:
            return q >= kv

    words: dict[str, int] = {}
    assert (pairs(loop) == (Q - KV < 1)).all() and (pairs(by_length) == (Q - KV < 1)).all()
    many.append(3)
    assert (pairs(loop) == (Q - KV < 4)).all() and (pairs(by_length) == (Q - KV < 2)).all()
    assert (pairs(caught) == (Q >= KV)).all()
    words["reach"] = 2
    assert (pairs(caught) == (Q - KV < 2)).all()


@pytest.mark.parametrize("empty", [{}, set()])
def test_the_truth_of_an_object(empty: Any) -> None:
    def mask(q: Any, kv: Any) -> Any:
        return (q >= kv) if not empty else (q >= 0)

    assert (pairs(mask) == (Q >= KV)).all()
    empty.update({"a": 1} if isinstance(empty, dict) else {1})
    assert pairs(mask).all()


def test_keys_are_values() -> None:
    """Of a dict that was captured, a captured number finds what it finds in Python, in a tuple, too."""
    reach: dict[Any, int] = {0: 7, 0.5: 1, (2, 0.5): 3}

    def caught(a: Any, b: Any, q: Any, kv: Any) -> Any:
        try:
            return q - kv < reach[a, b]
        except KeyError:
            return q >= kv

    def by_key(x: Any) -> Any:
        return lambda q, kv: q - kv < reach[x]

    def by_pair(a: Any, b: Any) -> Any:
        return lambda q, kv: caught(a, b, q, kv)

    for x in (0.5, 0, np.float32(0.5)):
        assert (pairs(by_key(x)) == (reach[x] > Q - KV)).all()
    assert (pairs(by_pair(2, 0.5)) == (Q - KV < 3)).all() and (pairs(by_pair(1, 0.5)) == (Q >= KV)).all()
    with pytest.raises(ProblemError, match="depends on q"):
        trace.bind(lambda q, kv: caught(q, 0.5, q, kv), "mask")
    half, several = 0.5, [1, 2]
    for f in (lambda q, kv: q < several[half], lambda q, kv: q < len(range(half))):  # type: ignore[call-overload,arg-type]
        with pytest.raises(ProblemError, match="a float stands where Python needs an int"):
            trace.bind(f, "mask")


class OfNumpy(np.ndarray):
    pass


@pytest.mark.parametrize("own", [DOC, DOC.view(OfNumpy), {"a": 1}, [*range(300)], [1, 2], 2, 0.5, "a", Holder(), Holder, factory])
def test_symbols_answer_as_their_values(own: Any) -> None:
    """isinstance(), callable() and patterns of match. Symbols have more methods than what they stand for."""
    kinds = [
        OfNumpy, np.ndarray, collections.abc.Iterable, collections.abc.Callable, (int, (Holder, str)), int | float, type,
        collections.abc.Sized, collections.abc.Mapping,
    ]  # fmt: skip

    def said(x: Any, kind: Any) -> Any:
        return lambda q, kv: q >= kv if isinstance(x, kind) else q < kv

    for kind in kinds:
        assert (pairs(said(own, kind)) == ((Q >= KV) if isinstance(own, kind) else (Q < KV))).all(), kind

    def of_call(q: Any, kv: Any) -> Any:
        return q >= kv if callable(own) else q < kv

    def of_match(q: Any, kv: Any) -> Any:
        match own:
            case {}:
                return q > kv
            case [*_]:
                return q == kv
        return q < kv

    assert (pairs(of_call) == ((Q >= KV) if callable(own) else (Q < KV))).all()
    assert (pairs(of_match) == (Q > KV if isinstance(own, dict) else Q == KV if isinstance(own, list) else Q < KV)).all()


def test_what_objects_refuse() -> None:
    a, b = Holder(), Holder()
    reach = {0: 5, 1: 6}
    with pytest.raises(ProblemError, match=r"a is a Holder, and whole objects cannot be compared"):
        trace.bind(lambda q, kv: (q >= kv) if a == b else (q < kv), "mask")
    with pytest.raises(ProblemError, match=r"b is a Holder, which cannot be hashed"):
        trace.bind(lambda q, kv: (q >= kv) if {1: 2}.get(b) else (q < kv), "mask")  # type: ignore[call-overload]
    with pytest.raises(ProblemError, match=r"reach is a dict, whose members cannot be followed"):
        trace.bind(lambda q, kv: q - kv < sum(x for x in reach), "mask")


def test_names_of_attributes_hide_none() -> None:
    own = Holder(_value=2, _path=3, called=4, found=5)
    f = lambda q, kv: q - kv < own._value + own._path + own.called - own.found  # noqa: E731
    assert (pairs(f) == (Q - KV < 4)).all()
    own._value = 0  # type: ignore[attr-defined]
    assert (pairs(f) == (Q - KV < 2)).all()


def test_attributes_of_classes_and_modules_are_followed() -> None:
    class Config:
        reach = 3

        @classmethod
        def within(cls, q: Any, kv: Any) -> Any:
            return q - kv < cls.reach

        @staticmethod
        def causal(q: Any, kv: Any) -> Any:
            return q >= kv

    module = types.ModuleType("settings")
    module.reach = 3  # type: ignore[attr-defined]
    for owner in (Config, module):
        f = (lambda own: lambda q, kv: (q >= kv) & (q - kv < own.reach))(owner)
        owner.reach = 3  # type: ignore[attr-defined]
        assert (pairs(f) == ((Q >= KV) & (Q - KV < 3))).all()
        owner.reach = 5  # type: ignore[attr-defined]
        assert (pairs(f) == ((Q >= KV) & (Q - KV < 5))).all()
    by_method = lambda q, kv: Config.within(q, kv) & Config.causal(q, kv)  # noqa: E731
    for reach in (2, 4):
        Config.reach = reach
        assert (pairs(by_method) == ((Q >= KV) & (reach > Q - KV))).all()
    with pytest.raises(ProblemError, match=r"Config is a type, and objects that are made .* make it before, and capture it"):
        trace.bind(lambda q, kv: q >= kv + Config().reach, "mask")
    assert (pairs(lambda q, kv: in_sizes(Sizes(1, 2), q, kv)) == ((KV >= Q - 1) & (KV <= Q + 2))).all()


def test_methods_of_builtin_objects_are_refused() -> None:
    get = {"reach": 3}.get
    words = {"reach": 3}
    with pytest.raises(ProblemError, match=r"get is a builtin_function_or_method, of a dict, .*cannot be followed.*x\[key\]"):
        trace.bind(lambda q, kv: q - kv < get("reach"), "mask")
    with pytest.raises(ProblemError, match=r"words.get is a builtin_function_or_method, of a dict, .*call it before"):
        trace.bind(lambda q, kv: q - kv < words.get("reach"), "mask")


def test_no_method_of_an_array_is_kept() -> None:
    class Owned(np.ndarray):
        pass

    array = DOC.copy().view(Owned)
    alive = weakref.ref(array)
    total = array.sum
    trace.bind((lambda unused: lambda q, kv: (unused is not None) & (q >= kv))(total), "mask")
    del array, total
    gc.collect()
    assert alive() is None


def test_zeros_of_either_sign_are_two_numbers() -> None:
    def make(c: float) -> Any:
        return lambda s, q, kv: np.where(1.0 / c > 0.0, s + kv, s - kv)

    def by_sign(c: float) -> Any:
        return lambda s, q, kv: s + kv if math.copysign(1.0, c) > 0 else s - kv

    for f in (make, by_sign):
        with np.errstate(divide="ignore"):
            for c, sign in ((0.0, 1), (-0.0, -1), (0.0, 1)):
                np.testing.assert_array_equal(logits(f(c), S), S + sign * KV)
    plus, minus = option(make(0.0), "score"), option(make(-0.0), "score")
    assert plus != minus and plus.kind == minus.kind
    assert math.copysign(1, minus.numbers[0]) < 0 < math.copysign(1, plus.numbers[0])


def test_a_nan_is_itself() -> None:
    found = {option((lambda c: lambda s, q, kv: s + c * kv)(float("nan")), "score") for _ in range(3)}
    assert len(found) == 1
    only = found.pop()
    assert FunctionScore(**json.loads(json.dumps(dataclasses.asdict(only)))) == only


def test_keys_of_any_kind() -> None:
    class Side(enum.Enum):
        left = 1

    reach = {Side.left: 3}
    f = lambda q, kv: q - kv < reach[Side.left]  # noqa: E731
    for n in (3, 5):
        reach[Side.left] = n
        assert (pairs(f) == (n > Q - KV)).all()
