"""The specification, against the definition written out pair by pair; and the tolerance and the cases that tests are made of."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, UnsupportedError, reference
from rawattn.reference.formula import Formula
from rawattn.testing import LAYOUTS, MARGIN, Case, Expected, cases, expect
from rawattn.variant import Option
from rawattn.variant.mask import And, Causal, Full, Mask, Window

INF = math.inf

# mask -> whether the query at position q among the keys keeps the key, for either alignment
MASKS: dict[str, tuple[Callable[..., Mask], Callable[[int, int], bool]]] = {
    "full": (lambda align: Full(), lambda q, key: True),
    "causal": (lambda align: Causal(align), lambda q, key: key <= q),
    "window": (lambda align: Window(2, 1, align), lambda q, key: q - 2 <= key <= q + 1),
    "window of itself": (lambda align: Window(0, 0, align), lambda q, key: key == q),
    "left": (lambda align: Window(left=3, align=align), lambda q, key: q - 3 <= key),
    "right": (lambda align: Window(right=2, align=align), lambda q, key: key <= q + 2),
    "wide": (lambda align: Window(2**31, 2**40, align), lambda q, key: True),
    "both": (lambda align: And(Causal(align), Window(2, 5, align)), lambda q, key: q - 2 <= key <= q),
}


def kept(name: str, align: str, q: int, key: int, q_len: int, kv_len: int) -> bool:
    return MASKS[name][1](q + (kv_len - q_len if align == "bottom_right" else 0), key)


def by_pairs(q: Any, k: Any, v: Any, scale: float, cap: float | None) -> list[float]:
    """o, and lse at its end, of one query that keeps all of these keys, from the definition."""
    logits = [scale * math.fsum(q * key) for key in k]
    if cap is not None:
        logits = [cap * math.tanh(s / cap) for s in logits]
    if not logits:
        return [0.0] * v.shape[1] + [-INF]
    lse = math.log(math.fsum(map(math.exp, logits)))
    return [math.fsum(math.exp(s - lse) * x for s, x in zip(logits, column, strict=True)) for column in v.T] + [lse]


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("name", MASKS)
def test_interval(name: str, align: str) -> None:
    for q_len, kv_len in itertools.product(range(8), range(8)):
        begin, end = MASKS[name][0](align).interval(np.arange(q_len), q_len, kv_len)
        for q, key in itertools.product(range(q_len), range(kv_len)):
            assert (begin[q] <= key < end[q]) == kept(name, align, q, key, q_len, kv_len), (q, key, q_len, kv_len)


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("q_len", range(1, 5))
def test_definition(name: str, align: str, cap: float | None, q_len: int) -> None:
    case = Case("fp64", 2, q_len, 6, 4, 2, 3, 5, softcap=cap, scale=-0.7, mask=MASKS[name][0](align))
    q, k, v = case.inputs()
    o, lse = reference.attention(q, k, v, return_lse=True, **case.options)
    for b, h, row in itertools.product(range(2), range(4), range(q_len)):
        keys = [j for j in range(6) if kept(name, align, row, j, q_len, 6)]
        wanted = by_pairs(q[b, row, h], k[b, keys, h // 2], v[b, keys, h // 2], -0.7, cap)
        np.testing.assert_allclose([*o[b, row, h], lse[b, h, row]], wanted, rtol=1e-13, atol=1e-14)


@settings(max_examples=40)
@given(cases(longest=40, layouts=[name for name in LAYOUTS if name != "reversed"], head_dims=(1, 8, 24)))
def test_torch_agrees(case: Case) -> None:
    ours = reference.attention(*case.inputs()[:3], **cu(case), return_lse=True, **case.options)
    theirs = reference.attention(*case.inputs("torch")[:3], **cu(case, "torch"), return_lse=True, **case.options)
    for x, y in zip(ours, theirs, strict=True):
        assert x.dtype == np.float64 and y.dtype == torch.float64
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


def cu(case: Case, library: str = "numpy") -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), case.inputs(library)[3:], strict=False))


@settings(max_examples=40)
@given(cases(longest=40, head_dims=(1, 8), packed=True))
def test_packed_sequences_are_attended_alone(case: Case) -> None:
    q, k, v, cu_q, cu_kv = case.inputs()
    o, lse = reference.attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, return_lse=True, **case.options)
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_kv[i], cu_kv[i + 1])
        alone, lse_alone = reference.attention(q[None, rows], k[None, keys], v[None, keys], return_lse=True, **case.options)
        np.testing.assert_array_equal(o[rows], alone[0])
        np.testing.assert_array_equal(lse[:, rows], lse_alone[0])


@settings(max_examples=40)
@given(cases(longest=40, head_dims=(1, 8)), st.data())
def test_rows(case: Case, data: st.DataObject) -> None:
    """Some rows are what they are among all, up to the order of sums."""
    q, k, v = case.inputs()[:3]
    rows = data.draw(st.lists(st.integers(0, q.shape[-3] - 1), max_size=5)) if q.shape[-3] else []
    o, lse = reference.attention(q, k, v, **cu(case), return_lse=True, **case.options)
    some, lse_some = reference.attention(q, k, v, **cu(case), return_lse=True, rows=rows, **case.options)
    np.testing.assert_allclose(some, o[..., rows, :, :], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse_some, lse[..., rows], rtol=1e-12, atol=1e-14)


def test_nothing_kept() -> None:
    q, k, v = Case("fp32", q_len=3, kv_len=2).inputs()
    o, lse = reference.attention(q, k, v, causal=True, return_lse=True)  # the first query is before the first key
    assert (o[0, 0] == 0).all() and lse[0, 0, 0] == -INF
    assert np.isfinite(lse[0, 0, 1:]).all() and (o[0, 1:] != 0).all()
    k[:] = -INF
    o, lse = reference.attention(abs(q), k, v, return_lse=True)
    assert (o == 0).all() and (lse == -INF).all()
    o, lse = reference.attention(q, k[:, :0], v[:, :0], return_lse=True)
    assert (o == 0).all() and (lse == -INF).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_masked_numbers_take_no_part(library: str, bad: float) -> None:
    case = Case("fp32", q_len=4, kv_len=6, causal=True)
    q, k, v = case.inputs(library)
    o, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    k[:, 5], v[:, 5] = bad, bad  # only the last query keeps the last key
    o_bad, lse_bad = reference.attention(q, k, v, causal=True, return_lse=True)
    np.testing.assert_allclose(o_bad[:, :3], o[:, :3], rtol=1e-14)
    np.testing.assert_allclose(lse_bad[..., :3], lse[..., :3], rtol=1e-14)
    assert not np.isfinite(np.asarray(o_bad[:, 3])).any()


def test_nan_spreads_along_its_row() -> None:
    q, k, v = Case("fp32", q_len=4, kv_len=6, causal=True).inputs()
    q[0, 1, 0, 7] = math.nan
    k[0, 5, 0, 7] = math.nan
    o, lse = reference.attention(q, k, v, causal=True, return_lse=True)
    assert np.isnan(o).any(-1)[0, :, 0].tolist() == [False, True, False, True]
    assert np.isnan(lse)[0, 0].tolist() == [False, True, False, True]


def test_infinite_logits() -> None:
    """inf - inf is NaN; a logit of -inf beside finite ones is a probability of 0."""
    q, k, v = np.ones((1, 1, 1, 1)), np.array([[[[1.0]], [[-INF]]]]), np.array([[[[3.0]], [[5.0]]]])
    o, lse = reference.attention(q, k, v, return_lse=True)
    assert o.item() == 3 and lse.item() == 1
    assert np.isnan(reference.attention(q, -k, v)).all()


def test_long_sequences_fit_in_memory() -> None:
    q, k, v = Case("fp32", q_len=8192, kv_len=8192, head_dim=8, head_dim_v=8).inputs()
    tracemalloc.start()
    reference.attention(q, k, v, causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 8 * 8192**2  # bytes; all logits at once take twice this


class Strange(Option):
    type = "Strange"


def test_unknown_score() -> None:
    score: Any = Strange()
    with pytest.raises(UnsupportedError, match=r"Strange.* has no logit\(...\)"):
        reference.attention(*Case("fp32").inputs(), score=score)


# ---- sinks and scores of one's own ---------------------------------------------------------------------------------------


class Alibi(Strange):
    """s + slopes[head] (kv - q): Press et al., arXiv 2108.12409; and what all else that a score is given adds."""

    def __init__(self, slopes: Any, batch: float = 0.0) -> None:
        for name, value in {"slopes": slopes, "batch": batch}.items():
            object.__setattr__(self, name, value)

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s + self.slopes[head] * (kv - q) + self.batch * batch * q

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return None


def by_all_pairs(case: Case, logit: Callable[..., float]) -> tuple[Any, Any]:
    """o and lse of a case from the definition, where logit(s, batch, head, q, kv) is the score; packed sequences as they lie."""
    q, k, v, *cu = case.inputs()
    sinks = case.sink_logits() if case.sinks else [-INF] * case.heads
    o, lse = np.zeros((*q.shape[:-1], v.shape[-1])), np.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]))
    parts: list[tuple[Any, Any]] = [(b, b) for b in range(case.batch)]
    if cu:
        ends = zip(itertools.pairwise(cu[0]), itertools.pairwise(cu[1]), strict=True)
        parts = [(slice(*rows), slice(*keys)) for rows, keys in ends]
    for (b, (rows, keys)), h in itertools.product(enumerate(parts), range(case.heads)):
        kv_head = h // (case.heads // case.kv_heads)
        lse_at = lse[rows] if isinstance(rows, int) else lse[:, rows]
        for i in range(len(q[rows])):
            begin, end = (x.item() for x in case.op.spec.placed_mask.interval(np.array([i]), len(q[rows]), len(k[keys])))
            dots = [case.op.scale * math.fsum(q[rows][i, h] * k[keys][j, kv_head]) for j in range(begin, end)]
            s = [logit(x, b, h, i, j) for j, x in enumerate(dots, begin)]
            total = math.fsum(map(math.exp, s)) + math.exp(sinks[h])
            lse_at[h, i] = math.log(total) if total else -INF
            for j, x in enumerate(s, begin):
                o[rows][i, h] += math.exp(x) / total * v[keys][j, kv_head]
    return o, lse


@settings(max_examples=40)
@given(cases(("fp64",), longest=8, layouts=("contiguous",), head_dims=(1, 3), sinks=None))
def test_definition_with_sinks_and_a_score(case: Case) -> None:
    case, slopes = dataclasses.replace(case, softcap=None), 2.0 ** -np.arange(1, case.heads + 1)
    q_first, kv_first = case.q_offset or 0, case.kv_offset or 0
    wanted = by_all_pairs(case, lambda s, b, h, i, j: s + slopes[h] * (kv_first + j - q_first - i) + 0.125 * b * (q_first + i))
    for library in ("numpy", "torch"):
        q, k, v = case.inputs(library)[:3]
        score: Any = Alibi(slopes if library == "numpy" else torch.from_numpy(slopes), 0.125)
        found = reference.attention(q, k, v, **cu(case, library), return_lse=True, score=score, **case.options)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


def test_extreme_sinks() -> None:
    case = Case("fp32", 1, 5, 3, 4, 1, causal=True)
    q, k, v = case.inputs()
    sinks = np.array([-INF, INF, math.nan, 1.5])
    plain, plain_lse = reference.attention(q, k, v, causal=True, return_lse=True)
    o, lse = reference.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    np.testing.assert_array_equal(o[:, :, 0], plain[:, :, 0])
    np.testing.assert_array_equal(lse[:, 0], plain_lse[:, 0])
    assert (o[:, :, 1] == 0).all() and (lse[:, 1] == INF).all()
    assert np.isnan(o[:, 2:, 2]).all() and np.isnan(lse[:, 2]).all()
    assert (o[:, :2, 3] == 0).all() and (lse[:, 3, :2] == 1.5).all() and (lse[:, 3, 2:] > 1.5).all()
    no_keys = reference.attention(q, k[:, :0], v[:, :0], sinks=sinks, return_lse=True)
    assert (no_keys[0] == 0).all() and (no_keys[1][0, :, 0][[0, 1, 3]] == sinks[[0, 1, 3]]).all()


def test_sinks_of_another_length() -> None:
    with pytest.raises(ProblemError, match=r"sinks has shape \(3,\); it must be \(1,\)"):
        reference.attention(*Case("fp32").inputs(), sinks=np.zeros(3))


# ---- the plain formula and the tolerance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_plain_formula_errs_like_its_format(dtype: str, library: str) -> None:
    case = Case(dtype, 1, 200, 200, 2, 2, scale=0.1)
    inputs = case.inputs(library)
    o, plain = reference.attention(*inputs, **case.options), reference.attention(*inputs, **case.options, rounded=True)
    error = float(abs(plain - o).max() / abs(o).max())
    eps = float(ml_dtypes.finfo(case.op.element.dtype).eps)
    assert 0.02 * eps < error < (8 if dtype == "fp32" else 2) * eps


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("left_out", [None, "s", "p"])
def test_plain_formula_rounds(dtype: str, left_out: str | None) -> None:
    """It is the formula with logits and probabilities rounded, and not the one that leaves out either."""
    case = Case(dtype, q_len=60, kv_len=90)
    o, lse = reference.attention(*case.inputs(), return_lse=True, rounded=True)
    q, k, v = (x[0, :, 0].astype(np.float32) for x in case.inputs())

    def rounding(name: str, x: Any) -> Any:
        return x if name == left_out else x.astype(case.op.element.dtype).astype(np.float32)

    s = rounding("s", np.float32(case.op.scale) * (q @ k.T))
    total = np.exp(s).sum(1, keepdims=True)
    close = [np.allclose(o[0, :, 0], rounding("p", np.exp(s) / total) @ v, rtol=1e-4, atol=1e-5)]
    close.append(np.allclose(lse[0, 0], np.log(total)[:, 0], rtol=1e-6))
    assert close == [left_out is None, left_out != "s"]


CAUSAL = {dtype: Case(dtype, 1, 32, 64, 2, 1, causal=True, seed=3) for dtype in ("bf16", "fp32", "fp64")}


@pytest.fixture(scope="module", params=CAUSAL)
def expected(request: pytest.FixtureRequest) -> Expected:
    return expect(*CAUSAL[request.param].inputs(), causal=True)


def test_tolerance_takes_the_reference_and_no_more(expected: Expected) -> None:
    o, lse = expected.o.copy(), expected.lse.copy()
    expected.check(o, lse)
    o[0, 3, 1, 5] += 0.9 * expected.o_error[0, 3, 1, 0]
    lse[0, 1, 4] -= 0.9 * expected.lse_error[0, 1, 4]
    expected.check(o, lse)
    o[0, 3, 1, 5] += 0.3 * expected.o_error[0, 3, 1, 0]
    with pytest.raises(AssertionError, match=r"o\[0, 3, 1, 5\] is .* \(1 of 4096 are wrong\)"):
        expected.check(o)
    lse[0, 1, 4] -= 0.3 * expected.lse_error[0, 1, 4]
    with pytest.raises(AssertionError, match=r"lse\[0, 1, 4\]"):
        expected.check(expected.o, lse)


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_tolerance_finds_what_is_not_finite(expected: Expected, bad: float) -> None:
    o = expected.o.copy()
    o[0, 31, 0, 0] = bad
    with pytest.raises(AssertionError, match=r"o\[0, 31, 0, 0\]"):
        expected.check(o)
    with pytest.raises(AssertionError, match=r"o\[0, 31, 0, 0\]"):
        dataclasses.replace(expected, o=o).check(expected.o)
    dataclasses.replace(expected, o=o).check(o)


def test_tolerance_finds_another_shape(expected: Expected) -> None:
    with pytest.raises(AssertionError, match="shape"):
        expected.check(expected.o[0])


@pytest.mark.parametrize("case", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize(
    "wrong",
    [{"causal": True, "scale": 1.05 / 8}, {"mask": And(Causal(), Window(62))}, {"causal": True, "softcap": 5.0}],
    ids=str,
)
def test_tolerance_is_tight(case: Case, wrong: dict[str, Any]) -> None:
    """A scale that is off by a twentieth, a key that one query loses, a cap on small logits: all are found."""
    inputs = case.inputs()
    expected, found = expect(*inputs, causal=True), reference.attention(*inputs, **wrong)
    with pytest.raises(AssertionError, match="allowed"):
        expected.check(found)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
def test_o_tolerance_would_not_bear_a_factor_of_4(dtype: str, causal: bool) -> None:
    """Logits and probabilities with two bits less than the format are found, and would not be with four times the tolerance."""
    case = Case(dtype, 1, 200, 200, 2, 2, causal=causal, seed=1)
    expected, eps = expect(*case.inputs(), **case.options), {"bf16": 2.0**-7, "fp16": 2.0**-10}[dtype]

    def coarse(x: Any) -> Any:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(mantissa / (4 * eps)) * (4 * eps), exponent)

    formula = Formula(np, {}, np.float64, coarse, case.op.spec.placed_mask, case.op.score, case.op.scale)
    o, _ = formula.forward(*case.inputs(), None, None, None)
    with pytest.raises(AssertionError, match="allowed"):
        expected.check(o)
    dataclasses.replace(expected, o_error=4 * expected.o_error).check(o)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("softcap", [None, 1000.0])
def test_lse_tolerance_would_not_bear_a_factor_of_10(dtype: str, softcap: float | None) -> None:
    """A scale that is off by 2^-17, or 2^-45 in float64, is found, and would not be with ten times the tolerance."""
    case = Case(dtype, 1, 200, 200, 2, 2, causal=True, softcap=softcap, seed=1)
    expected = expect(*case.inputs(), **case.options)
    wrong = case.op.scale * (1 + (2.0**-45 if dtype == "fp64" else 2.0**-17))
    _, lse = reference.attention(*case.inputs(), **case.options, scale=wrong, return_lse=True)
    with pytest.raises(AssertionError, match=r"lse.*allowed"):
        expected.check(expected.o, lse)
    dataclasses.replace(expected, lse_error=10 * expected.lse_error).check(expected.o, lse)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_lse_tolerance_does_not_grow_with_the_cap(dtype: str) -> None:
    case = Case(dtype, 1, 100, 200, seed=1)
    errors = [expect(*case.inputs(), softcap=cap).lse_error.max() for cap in (None, 100.0, 1e6)]
    assert errors[2] < 1.1 * errors[1] < 3 * errors[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": np.float32([20])}, {"score": lambda s, q, kv: s - 100.0}, {"mask": Causal("top_left")}],
    ids=["alone", "sinks", "a score that adds", "inf in masked keys"],
)
def test_o_tolerance_follows_from_dot_products(options: dict[str, Any]) -> None:
    """A scale that is off by 2^-18, a key that is left out, and sums of any row that were not rescaled when its maximum moved are
    found in float32."""
    q, k, v = Case("fp32", 1, 100, 200, 1, 1, seed=1).inputs()
    if "mask" in options:
        k[0, 100:, 0, 0] = INF
    expected, o = expect(q, k, v, **options), reference.attention(q, k, v, **options)
    expected.check(o)
    shorter = reference.attention(q, k[:, 1:], v[:, 1:], **options, q_offset=0, kv_offset=1)
    for wrong in (reference.attention(q, k, v, **options, scale=(1 + 2.0**-18) / 8), shorter):
        with pytest.raises(AssertionError, match="allowed"):
            expected.check(wrong)
    assert (np.abs(o).max(-1, keepdims=True) * 2.0**-12 > expected.o_error).all()


def test_o_tolerance_is_of_the_row() -> None:
    """Under a causal mask the first rows of o are the largest; what they may err is a tenth of what the last rows hold."""
    case = Case("bf16", 1, 1024, 1024, causal=True)
    expected = expect(*case.inputs(), causal=True)
    assert expected.o_error[0, 0].item() > 5 * expected.o_error[0, -1].item()
    assert (expected.o_error < 0.08 * np.abs(expected.o).max(-1, keepdims=True)).all()


# ---- cases ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(cases(longest=20, head_dims=(8, 24)))
def test_inputs_are_what_the_case_says(case: Case) -> None:
    plain = dataclasses.replace(case, layout="contiguous").inputs()
    for x, y in zip(case.inputs(), plain, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        if case.layout != "expanded":
            np.testing.assert_array_equal(x, y)
        assert not np.isnan(x.astype(np.float64)).any()
    q, k, v = case.inputs()[:3]
    assert case.op.element.dtype == q.dtype and q.shape[-2:] == (case.heads, case.head_dim)
    assert k.shape[-2:] == (case.kv_heads, case.head_dim) and v.shape[-2:] == (case.kv_heads, case.head_dim_v)
    assert (case.op.total_q, case.op.total_kv) == (math.prod(q.shape[:-2]), math.prod(k.shape[:-2]))
    assert all(x.strides[-1] == x.itemsize for x in (q, k, v))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_strided_and_poisoned(layout: str) -> None:
    case = Case("fp32", 2, 5, 5, 3, 3, 8, 8, layout=layout)
    q, k, _ = case.inputs()
    strides = {
        "contiguous": (120, 24, 8), "heads_first": (120, 8, 40), "packed": (360, 72, 8), "padded": (240, 48, 16),
        "expanded": (40, 8, 0), "reversed": (120, -24, 8),
    }  # fmt: skip
    assert tuple(s // 4 for s in k.strides[:3]) == strides[layout]
    for x in (q, case.out()):
        memory = x
        while memory.base is not None:
            memory = memory.base
        assert np.isnan(memory).sum() - np.isnan(x).sum() == memory.size - x.size >= 2 * MARGIN
    assert np.isnan(case.out()).all() and case.out().shape == (2, 5, 3, 8)


def test_options_keep_what_is_false_but_given() -> None:
    assert Case(scale=0.0).options == {"scale": 0.0}
    assert Case(causal=True, window=(0, None), softcap=3.0).options == {"causal": True, "window": (0, None), "softcap": 3.0}
    assert Case().options == {}


@pytest.mark.filterwarnings("error")
def test_without_keys_an_expectation_warns_of_nothing() -> None:
    q, k = np.ones((1, 4, 2, 8), np.float32), np.ones((1, 0, 2, 8), np.float32)
    expect(q, k, k).check(np.zeros_like(q))


def test_what_requires_grad_is_refused() -> None:
    """No graph would hold the reference, which detaches its inputs."""
    plain = [torch.randn(1, 4, 2, 8) for _ in range(4)]
    slopes = torch.randn(2, requires_grad=True)
    for i in range(4):
        followed = [x.clone().requires_grad_() if i == j else x for j, x in enumerate(plain)]
        for rounded in (False, True)[: 2 * (i < 3)]:
            with pytest.raises(ProblemError, match=r"requires grad, and rawattn\.reference has no autograd; detach it"):
                reference.attention(*followed[:3], rounded=rounded)
            with torch.no_grad():
                reference.attention(*followed[:3], rounded=rounded)
        with pytest.raises(ProblemError, match=r"rawattn\.reference\.attention_backward gives gradients"):
            reference.attention_backward(followed[3], *followed[:3])
    with pytest.raises(ProblemError, match="requires grad"):
        reference.attention(*plain[:3], score=lambda s, h: s * slopes[h])
    with pytest.raises(ProblemError, match="requires grad"):
        reference.merge_states([(plain[0].requires_grad_(), torch.zeros(1, 2, 4))])


def test_append_refuses_a_negative_position() -> None:
    """As ``rawattn.append`` does on the CPU, for a row that goes into the cache; one that goes nowhere may have one."""
    pools = [np.zeros((2, 4, 1, 8), np.float32) for _ in "kv"]
    cache, rows = rawattn.KVCache(*pools), np.ones((2, 1, 8), np.float32)
    angles = np.zeros((4, 4), np.float32)
    rotary = rawattn.Rotary(angles, angles, positions=np.array([-1, 0]))
    for append in (rawattn.append, reference.append):
        with pytest.raises(ProblemError, match="positions has -1 for a row that goes into the cache"):
            append(cache, None, rows, rows, slots=np.array([3, 1]), rotary=rotary)
        append(cache, None, rows, rows, slots=np.array([-1, 1]), rotary=rotary)
