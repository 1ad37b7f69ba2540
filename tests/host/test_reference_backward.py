"""The reference's gradients, against finite differences and torch's autograd; and what ``expect_backward`` allows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rawattn import UnsupportedError, reference
from rawattn.reference.formula import Formula
from rawattn.testing import LAYOUTS, Case, cases, expect_backward
from rawattn.variant import Option
from rawattn.variant.mask import Causal, Full
from rawattn.variant.score import Softcap

INF = math.inf
NAMES = ("dq", "dk", "dv", "dsinks")
SMALL = cases(longest=12, layouts=[name for name in LAYOUTS if name != "reversed"], head_dims=(1, 3, 8), sinks=None)


class Bent(Option):
    """A score whose slope is not 1 and that reads all it is given."""

    def __init__(self, slopes: Any) -> None:
        object.__setattr__(self, "slopes", slopes)

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 3 * xp.tanh(s / 2 + self.slopes[head] * batch) + 0.125 * (kv - q)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 1.5 * (1 - xp.tanh(s / 2 + self.slopes[head] * batch) ** 2)


def given_cu(case: Case, library: str = "numpy") -> dict[str, Any]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), case.inputs(library)[3:], strict=False))


def by_autograd(case: Case, score: Any, with_dlse: bool) -> list[Any]:
    """dq, dk, dv, dsinks in float64 by torch, of attention written out with dense masks."""
    q, k, v, *cu = [x.double().requires_grad_() if x.is_floating_point() else x for x in case.inputs("torch")]
    sinks = torch.from_numpy(case.sink_logits()).double() if case.sinks else torch.full((case.heads,), -INF).double()
    sinks.requires_grad_()
    do, dlse = (x.double() for x in case.output_gradients("torch"))
    loss = torch.zeros((), dtype=torch.float64)
    for i in range(len(case.lengths) if case.lengths is not None else case.batch):
        rows, keys = (slice(int(x[i]), int(x[i + 1])) for x in cu) if cu else (i, i)
        q_i, k_i, v_i = q[rows], k[keys].repeat_interleave(case.heads // case.kv_heads, 1), v[keys]
        v_i = v_i.repeat_interleave(case.heads // case.kv_heads, 1)
        positions, others = torch.arange(len(q_i))[:, None], torch.arange(len(k_i))[None]
        begin, end = case.op.spec.placed_mask.interval(np.arange(len(q_i)), len(q_i), len(k_i))
        kept = (others >= torch.from_numpy(begin)[:, None]) & (others < torch.from_numpy(end)[:, None])
        for h in range(case.heads):
            at = positions + (case.q_offset or 0), others + (case.kv_offset or 0)
            s = score.logit(torch, case.op.scale * q_i[:, h] @ k_i[:, h].T, i, h, *at)
            s = torch.where(kept, s, -INF)
            full = torch.cat([s, sinks[h].expand(len(s), 1)], 1)
            some = full.isfinite().any(1)
            lse = torch.logsumexp(full[some], 1)
            o = torch.exp(s[some] - lse[:, None]) @ v_i[:, h]
            loss = loss + (o * do[rows][some, h]).sum()
            if with_dlse:
                loss = loss + (lse * (dlse[:, rows][h] if cu else dlse[i, h])[some]).sum()
    found = torch.autograd.grad(loss, (q, k, v, sinks), allow_unused=True, materialize_grads=True) if loss.requires_grad else None
    return [np.zeros(x.shape) for x in (q, k, v, sinks)] if found is None else [x.numpy() for x in found]


@settings(max_examples=80)
@given(SMALL, st.booleans(), st.booleans())
def test_autograd_agrees(case: Case, with_dlse: bool, bent: bool) -> None:
    """Everything that attention takes, on both libraries."""
    case = dataclasses.replace(case, softcap=None if bent else case.softcap)
    score: Any = Bent(2.0 ** -np.arange(1, case.heads + 1)) if bent else case.op.score
    wanted = by_autograd(case, score, with_dlse)[: 4 if case.sinks else 3]
    for library in ("numpy", "torch"):
        do, dlse = case.output_gradients(library)
        options = {**case.options, **given_cu(case, library), **({"score": score} if bent else {})}
        q, k, v = case.inputs(library)[:3]
        found = reference.attention_backward(do, q, k, v, dlse=dlse if with_dlse else None, **options)
        for name, x, y in zip(NAMES, found, wanted, strict=False):
            assert x.dtype == (np.float64 if library == "numpy" else torch.float64)
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11, err_msg=name)
        assert len(found) == len(wanted)


@pytest.mark.parametrize("score", [Softcap(2.0), Bent(np.array([0.5, 0.25]))], ids=lambda score: type(score).__name__)
def test_finite_differences(score: Any) -> None:
    """The signs of all terms, those of dlse and the sink above all, without anybody's autograd."""
    case = Case("fp64", 2, 4, 5, 2, 1, 3, 2, causal=True, sinks=True)
    arrays, (do, dlse) = [*case.inputs(), case.sink_logits().astype(np.float64)], case.output_gradients()

    def loss() -> float:
        o, lse = reference.attention(*arrays[:3], sinks=arrays[3], causal=True, score=score, return_lse=True)
        return float((o * do).sum() + (lse * dlse).sum())

    found = reference.attention_backward(do, *arrays[:3], dlse=dlse, sinks=arrays[3], causal=True, score=score)
    for x, gradient in zip(arrays, found, strict=True):
        for at in np.ndindex(x.shape):
            saved, ends = x[at], []
            for step in (1e-5, -1e-5):
                x[at] = saved + step
                ends.append(loss())
            x[at] = saved
            assert abs((ends[0] - ends[1]) / 2e-5 - gradient[at]) < 1e-7


def test_rows_without_a_key_give_0() -> None:
    case = Case("fp64", q_len=6, kv_len=2, causal=True, sinks=True)
    do, dlse = case.output_gradients()
    dq, dk, dv, dsinks = reference.attention_backward(do, *case.inputs(), dlse=dlse, **case.options)
    assert (dq[:, :4] == 0).all() and (dq[:, 5] != 0).any() and all(np.isfinite(x).all() for x in (dk, dv, dsinks))
    inputs = [x[:, 4:] if x.shape[1] == 6 else x for x in (do, *case.inputs())]
    alone = reference.attention_backward(*inputs, dlse=dlse[..., 4:], **case.options)
    np.testing.assert_allclose(dk, alone[1], rtol=1e-13)
    np.testing.assert_allclose(dv, alone[2], rtol=1e-13)
    np.testing.assert_allclose(dsinks, alone[3] + dlse[..., :4].sum(), rtol=1e-13)
    q, k, v = case.inputs()
    nothing = reference.attention_backward(do, q, k[:, :0], v[:, :0], dlse=dlse, **case.options)
    assert (nothing[0] == 0).all() and nothing[1].shape[1] == 0
    np.testing.assert_allclose(nothing[3], dlse.sum(), rtol=1e-13)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_masked_numbers_take_no_part(library: str, bad: float) -> None:
    """The last key and value are for the last query alone, and the first query keeps the first key alone."""
    case = Case("fp64", q_len=4, kv_len=4, causal=True)
    (do, _), (q, k, v) = case.output_gradients(library), case.inputs(library)
    plain = reference.attention_backward(do[:, :3], q[:, :3], k[:, :3], v[:, :3], causal=True)
    k[:, 3], v[:, 3], do[:, 3], q[:, 3] = bad, bad, 0, 0
    dq = reference.attention_backward(do, q, k, v, causal=True)[0]
    np.testing.assert_allclose(dq[:, :3], plain[0], rtol=1e-12, atol=1e-14)
    q, k, v = case.inputs(library)
    plain = reference.attention_backward(do, q, k, v, causal=True)
    q[:, 0], do[:, 0] = bad, bad
    dq, dk, dv = reference.attention_backward(do, q, k, v, causal=True)
    for x, y in zip((dq, dk, dv), plain, strict=True):
        np.testing.assert_allclose(x[:, 1:], y[:, 1:], rtol=1e-12, atol=1e-14)


def test_a_score_without_slope_is_named() -> None:
    class Forward(Bent):
        slope: Any = None

    case = Case("fp32", q_len=2, kv_len=2)
    with pytest.raises(UnsupportedError, match=r"Forward.* has no slope\(...\)"):
        reference.attention_backward(case.output_gradients()[0], *case.inputs(), score=Forward([1.0]))


# ---- the plain formula and the tolerance ---------------------------------------------------------------------------------


def by_hand(case: Case, rounding: Any) -> tuple[Any, ...]:
    """dq, dk, dv of one head, in float32, where rounding(name, x) rounds the logits "s", "p", "o" and "ds"."""
    q, k, v, do = (x[0, :, 0].astype(np.float32) for x in (*case.inputs(), case.output_gradients()[0]))
    s = rounding("s", np.float32(case.op.scale) * (q @ k.T))
    p = np.exp(s - s.max(1, keepdims=True))
    p = rounding("p", p / p.sum(1, keepdims=True))
    o = rounding("o", p @ v)
    ds = rounding("ds", p * (do @ v.T - (do * o).sum(1, keepdims=True)))
    return case.op.scale * (ds @ k), case.op.scale * (ds.T @ q), p.T @ do


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("left_out", [None, "s", "p", "o", "ds"])
def test_plain_formula_rounds(dtype: str, left_out: str | None) -> None:
    """It is the formula with all four rounded, and not the one that leaves out any of them."""
    case = Case(dtype, q_len=60, kv_len=90)
    plain = reference.attention_backward(case.output_gradients()[0], *case.inputs(), rounded=True)
    numbers = case.op.element.dtype
    found = by_hand(case, lambda name, x: x if name == left_out else x.astype(numbers).astype(np.float32))
    close = [np.allclose(x[0, :, 0], y, rtol=1e-4, atol=1e-5) for x, y in zip(plain, found, strict=True)]
    assert close == {None: [True] * 3, "s": [False] * 3, "p": [False] * 3}.get(left_out, [False, False, True])  # type: ignore[call-overload]


EXPECTED = {dtype: Case(dtype, 1, 96, 128, 4, 2, causal=True, sinks=True, seed=3) for dtype in ("bf16", "fp32", "fp64")}


@pytest.mark.parametrize("dtype", EXPECTED)
def test_tolerance_takes_the_reference_and_no_more(dtype: str) -> None:
    case = EXPECTED[dtype]
    expected = expect_backward(case.output_gradients()[0], *case.inputs(), **case.options)
    exact = expected.gradients
    expected.check(**exact)
    for name, x in exact.items():
        at = np.unravel_index(np.abs(x).argmin(), x.shape)
        allowed = np.broadcast_to(expected.errors[name], x.shape)[at]
        for factor, good in ((0.9, True), (-0.9, True), (1.2, False), (math.nan, False), (INF, False)):
            wrong = x.copy()
            wrong[at] += factor * allowed
            if good:
                expected.check(**{**exact, name: wrong})
            else:
                with pytest.raises(AssertionError, match=rf"{name}\[.*\(1 of {x.size} are wrong\)"):
                    expected.check(**{**exact, name: wrong})


@pytest.mark.parametrize("dtype", EXPECTED)
@pytest.mark.parametrize("row", [0, 95])
def test_tolerance_is_tight_in_every_row(dtype: str, row: int) -> None:
    """A key that one query loses, the first or the last, is found in all gradients that it changes; so is a lost row of dv."""
    case = EXPECTED[dtype]
    do, inputs, sinks = case.output_gradients()[0], case.inputs(), case.sink_logits()
    expected = expect_backward(do, *inputs, **case.options)

    class Lossy(Causal):
        def interval(self, q: Any, q_len: int, kv_len: int) -> Any:
            begin, end = super().interval(q, q_len, kv_len)
            return begin, end - (q == row)

    found = dict(zip(NAMES, reference.attention_backward(do, *inputs, mask=Lossy(), sinks=sinks), strict=True))
    for name in ("dq", "dk", "dv"):
        with pytest.raises(AssertionError, match=f"{name}.*allowed"):
            expected.check(**{**expected.gradients, name: found[name]})


def kernel_like(case: Case, flush: bool) -> dict[str, Any]:
    """Gradients whose P and dS are rounded to fp16 before they are multiplied, as kernels do it, or set to 0 below 2^-14."""

    def rounding(x: Any) -> Any:
        near = x.astype(np.float16).astype(np.float64)
        return np.where(flush & (np.abs(near) < 2.0**-14), 0.0, near)

    @dataclasses.dataclass(frozen=True)
    class Rounded(Formula):
        def weights_backward(self, *given: Any) -> tuple[Any, ...]:
            p, ds, *rest = super().weights_backward(*given)
            return (rounding(p), rounding(ds), *rest)

    do, (q, k, v) = case.output_gradients()[0], case.inputs()
    formula = Rounded(np, {}, np.float64, lambda x: x, case.op.mask, case.op.score, case.op.scale)
    found = formula.backward(do, q, k, v, None, None, None, None)
    return {name: x.astype(np.float16) for name, x in zip(NAMES, found, strict=False)}


SUBNORMAL = {
    "peaked rows": Case("fp16", 1, 200, 200, 2, 2, 128, 128, causal=True, scale=1.0),
    "a saturated cap": Case("fp16", 1, 200, 200, 2, 2, 128, 128, causal=True, softcap=5.0, scale=-1.0),
    "a slope of nearly 0": Case("fp16", 1, 300, 300, 2, 2, 128, 128, causal=True, softcap=0.3, scale=0.3),
    "long rows": Case("fp16", 1, 40, 6000),
}


@pytest.mark.parametrize("case", SUBNORMAL.values(), ids=SUBNORMAL)
def test_tolerance_of_fp16_s_subnormal_numbers(case: Case) -> None:
    """A kernel that rounds to them passes, and one that sets them to 0 does not."""
    expected = expect_backward(case.output_gradients()[0], *case.inputs(), **case.options)
    expected.check(**kernel_like(case, flush=False))
    with pytest.raises(AssertionError, match="allowed"):
        expected.check(**kernel_like(case, flush=True))


@pytest.mark.parametrize("cap", [0.3, 1.0, 5.0])
def test_tolerance_of_a_cap_s_slope(cap: float) -> None:
    """In float32 a slope made of a tanh that errs by 5 eps passes, near saturation, too; the error of 256 eps does not."""
    case = Case("fp32", 1, 100, 100, 2, 2, softcap=cap, scale=0.2, causal=True)
    do, inputs, eps = case.output_gradients()[0], case.inputs(), 2.0**-23
    expected = expect_backward(do, *inputs, **case.options)

    class Erring(Softcap):
        def slope(self, xp: Any, s: Any, *place: Any) -> Any:
            return 1 - (xp.tanh(s / self.cap) * (1 + self.error)) ** 2

    for error, good in ((5 * eps, True), (-5 * eps, True), (256 * eps, False)):
        Erring.error = error  # type: ignore[attr-defined]
        found = reference.attention_backward(do, *inputs, causal=True, scale=0.2, score=Erring(cap))
        if good:
            expected.check(*found)
        else:
            with pytest.raises(AssertionError, match="allowed"):
                expected.check(*found)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tolerance_would_not_bear_a_factor_of_4(dtype: str) -> None:
    """A backward whose P and dS have one bit less than the format is found, and would not be with four times the tolerance."""
    case = Case(dtype, 1, 200, 200, 2, 2, seed=1)
    do, inputs = case.output_gradients()[0], case.inputs()
    expected, eps = expect_backward(do, *inputs), {"bf16": 2.0**-7, "fp16": 2.0**-10}[dtype]

    def coarse(x: Any) -> Any:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(mantissa * 2 / (8 * eps)) * (8 * eps) / 2, exponent)

    formula = Formula(np, {}, np.float64, coarse, Full(), case.op.score, case.op.scale)
    found = dict(zip(NAMES, formula.backward(do, *inputs, None, None, None, None), strict=False))
    for name in ("dq", "dk", "dv"):
        error = np.abs(found[name] - expected.gradients[name]) / expected.errors[name]
        assert 1 < error.max() < 4, (name, error.max())
