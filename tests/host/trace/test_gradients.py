"""Derivatives of scores by what they captured, against differences; how these gradients are gathered; rules, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import trace
from rawattn.trace.evaluation import evaluate
from rawattn.trace.expressions import S
from rawattn.trace.gradients import RULES, gathering, gradients
from tests import zoo

N, M = 23, 37
AT = {
    "b": np.asarray(1), "h": np.asarray(1), "q": np.arange(N)[:, None], "kv": np.arange(M)[None], "q_len": np.asarray(N),
    "kv_len": np.asarray(M),
}  # fmt: skip


@pytest.mark.parametrize("maker", zoo.SCORES, ids=lambda maker: maker.__name__)
def test_captured(maker: Any) -> None:
    rng = np.random.default_rng(0)
    traced, arrays, numbers = trace.bind(maker(rng, N, M), "score")
    root, given = traced.code.root, [x.astype(np.float64) if x.dtype.kind == "f" else x for x in arrays]
    s = rng.standard_normal((N, M)) * 3

    def total(arrays: Any = given, numbers: Any = numbers) -> float:
        return float(np.broadcast_to(evaluate(root, AT | {"s": s}, arrays, numbers), (N, M)).sum())

    found = gradients(root)
    for kind, captured in (("load", given), ("param", list(numbers))):
        for i, value in enumerate(captured):
            if np.asarray(value).dtype.kind != "f" or (maker is zoo.t5_buckets and kind == "param"):  # a number that is rounded
                continue
            sums = np.zeros(np.shape(value))
            for node, derivative in found.items():
                if node.op == kind and node.args[0] == i:
                    at = AT | {"s": s}
                    part = np.broadcast_to(evaluate(derivative, at, given, numbers), (N, M))
                    index = tuple(np.broadcast_to(evaluate(x, at, given, numbers), (N, M)) for x in node.args[2:])
                    np.add.at(sums, index, part if index else part.sum())
            place = tuple(int(rng.integers(0, n)) for n in sums.shape)
            ends = []
            for sign in (1, -1):
                moved = list(captured)
                moved[i] = np.array(value, np.float64)
                moved[i][place] += sign * 1e-5
                ends.append(total(arrays=moved) if kind == "load" else total(numbers=moved))
            np.testing.assert_allclose(sums[place], (ends[0] - ends[1]) / 2e-5, rtol=1e-6, atol=1e-5)


X, Y = np.array([0.3, -1.2, 2.5]), np.array([0.7, 1.9, -0.4])
CURVES: dict[str, Any] = {
    "add": lambda s, x: s + x[0], "sub": lambda s, x: x[1] - s, "mul": lambda s, x: s * x[1],
    "div": lambda s, x: x[1] / s + s / x[0], "neg": lambda s, x: -s, "exp": lambda s, x: np.exp(s * x[0]),
    "pow": lambda s, x: (1 + s * s) ** x[1] + s ** np.ceil(x[1]) + abs(x[0]) ** s, "expm1": lambda s, x: np.expm1(s * x[0]),
    "log1p": lambda s, x: np.log1p(s * s),
    "exp2": lambda s, x: 2.0 ** (s * x[0]), "log": lambda s, x: np.log(1 + s * s), "log2": lambda s, x: np.log2(1 + s * s),
    "tanh": lambda s, x: np.tanh(s * x[0]), "sqrt": lambda s, x: np.sqrt(1 + s * s), "sin": lambda s, x: np.sin(s),
    "cos": lambda s, x: np.cos(s * x[0]), "abs": lambda s, x: abs(s), "erf": lambda s, x: gelu(s),
    "min": lambda s, x: np.minimum(s, x[0] * s), "max": lambda s, x: np.maximum(s * s, x[0]),
    "where": lambda s, x: np.where(s > x[0], s * s, x[1] * s),
}  # fmt: skip


def gelu(s: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.functional.gelu(s)


def test_every_rule_has_a_curve() -> None:
    assert set(CURVES) == set(RULES)


@pytest.mark.parametrize("rule", CURVES)
def test_rule(rule: str) -> None:
    captured = np.array([0.6, 1.7])
    traced, arrays, numbers = trace.bind(lambda s: CURVES[rule](s, captured), "score")
    s = np.random.default_rng(0).standard_normal(200) * 2
    value, slope = traced.code.root, gradients(traced.code.root)[S]
    ends = [evaluate(value, {"s": s + d}, arrays, numbers) for d in (1e-6, -1e-6)]
    numeric = np.broadcast_to((ends[0] - ends[1]) / 2e-6, s.shape)
    np.testing.assert_allclose(
        np.broadcast_to(evaluate(slope, {"s": s}, arrays, numbers), s.shape), numeric, rtol=1e-4, atol=1e-5
    )


def test_what_is_not_followed() -> None:
    floors, _, _ = trace.bind(lambda s, q: np.floor(s) + q, "score")
    assert S not in gradients(floors.code.root)


@pytest.mark.parametrize(
    ("f", "expected"),
    [
        (lambda s, b, h, q, kv: s * X[h], "tiles"),
        (lambda s, b, h, q, kv: s + X[b * 2 + h], "tiles"),
        (lambda s, b, h, q, kv: s + X[q], "rows"),
        (lambda s, b, h, q, kv: s + ROWS[h, kv], "columns"),
        (lambda s, b, h, q, kv: s + ROWS[q, kv], "pairs"),
        (lambda s, b, h, q, kv: s + ROWS[h, kv - q], "diagonals"),
        (lambda s, b, h, q, kv: s + X[q // 2], "rows"),
        (lambda s, b, h, q, kv: s + ROWS[b + kv // 3, kv], "columns"),
        (lambda s, b, h, q, kv: s + ROWS[q // 2, kv], "diagonals"),
        (lambda s, b, h, q, kv: s + X[s.floor().int()], "scattered"),
    ],
    ids=range(10),
)  # fmt: skip
def test_gathering(f: Any, expected: str) -> None:
    traced, _, _ = trace.bind(f, "score")
    (load,) = (x for x in gradients(traced.code.root) if x.op == "load")
    assert gathering(load) == expected
    assert gathering(load, checked=[0]) == ("diagonals" if expected == "pairs" else expected)


ROWS = np.zeros((3, 3), np.float32)
