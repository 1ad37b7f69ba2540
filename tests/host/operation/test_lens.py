"""q_lens and kv_lens: sequences that use a part of their rows."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, reference
from rawattn.array import reading
from rawattn.driver.device import TYPICAL
from rawattn.operation import Forward
from rawattn.operation.spec import Spec
from rawattn.runtime.plan import Plan
from rawattn.runtime.select import select
from rawattn.testing import Case, cases, expect, expect_backward
from tests.emulator import gpu
from tests.operations import backward


@st.composite
def parts(draw: Any) -> tuple[Case, Any, Any]:
    """A case, and how much of its rows each sequence uses; None for all."""
    case = draw(cases(longest=80, head_dims=(8, 17, 64), sinks=None))
    pairs = case.lengths if case.lengths is not None else ((case.q_len, case.kv_len),) * case.batch
    q_lens, kv_lens = ([draw(st.integers(0, pair[side])) for pair in pairs] for side in (0, 1))
    which = draw(st.sampled_from(((1, 1), (1, 0), (0, 1))))
    return case, *(np.array(x, np.int32) if use else None for x, use in zip((q_lens, kv_lens), which, strict=True))


@settings(max_examples=100, deadline=None)
@given(parts())
def test_reference(drawn: tuple[Case, Any, Any]) -> None:
    """Each sequence is as if it had the used rows alone; what is behind them may be NaN."""
    case, q_lens, kv_lens = drawn
    q, k, v, *starts = case.inputs()
    call = rawattn.attention if case.lengths is None else rawattn.attention_varlen
    exact = reference.attention(
        q, k, v, **case.options, return_lse=True, q_lens=q_lens, kv_lens=kv_lens,
        **dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=False)),
    )  # fmt: skip
    spans = [(i, i, i) for i in range(case.batch)]
    if case.lengths is not None:
        edges = [np.split(np.arange(x[-1]), x[1:-1]) for x in starts]
        spans = [(rows, keys, (slice(None), rows)) for rows, keys in zip(*edges, strict=True)][: len(case.lengths)]
    if kv_lens is not None and case.layout != "expanded":
        k, v = k.copy(), v.copy()
        for (_, keys, _), n in zip(spans, kv_lens, strict=True):
            for x in (k, v):
                if isinstance(keys, int):
                    x[keys, n:] = np.nan
                else:
                    x[keys[n:]] = np.nan
    found = call(q, k, v, *starts, q_lens=q_lens, kv_lens=kv_lens, return_lse=True, **case.options)
    sinks = case.options.get("sinks", np.full(case.heads, -np.inf))
    for i, (rows, keys, at) in enumerate(spans):
        n, m = (None if x is None else int(x[i]) for x in (q_lens, kv_lens))
        wanted = expect(q[rows][None, :n], k[keys][None, :m], v[keys][None, :m], **case.options)
        for o, lse in (found, exact):
            wanted.check(o[rows][None, :n], lse[at][None, :, :n])
            if n is not None:
                assert not o[rows][n:].any() and (lse[at][:, n:] == sinks[:, None]).all()


def test_a_score_without_loops() -> None:
    class Twice(rawattn.score.Scale):
        def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
            return 2 * s + 0.1 * q

    q, k, v, *_ = Case(dtype="fp32", batch=2, q_len=9, kv_len=12).inputs()
    lens = {"q_lens": np.array([4, 9], np.int32), "kv_lens": np.array([12, 5], np.int32)}
    o = rawattn.attention(q, k, v, causal=True, score=Twice(), **lens)
    np.testing.assert_allclose(o, reference.attention(q, k, v, causal=True, score=Twice(), **lens), atol=1e-5)


ROWS = np.zeros((2, 5, 1, 8), np.float32)
WRONG = {
    "dtype": (
        {"q_lens": np.array([1, 2])},
        "q_lens is int64 of shape (2,); it must be int32 of shape (2,)",
    ),
    "shape": ({"kv_lens": np.zeros(3, np.int32)}, "kv_lens is int32 of shape (3,); it must be int32 of shape (2,)"),
    "long": ({"q_lens": np.array([5, 6], np.int32)}, "q_lens[1] is 6; it must be from 0 to 5, the sequence's rows of q."),
    "negative": ({"kv_lens": np.array([-1, 5], np.int32)}, "kv_lens[0] is -1; it must be from 0 to 5, the sequence's rows of k."),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as error:
        rawattn.attention(ROWS, ROWS, ROWS, **given)
    assert message in str(error.value)


def test_operation() -> None:
    names = {name: reading.read(ROWS, name)._replace(device=0) for name in "qkv"}
    op = Forward.of(names | {"q_lens": reading.read(np.zeros(2, np.int32), "q_lens")._replace(device=0)}, Spec())
    assert [x.name for x in op.inputs] == ["q", "k", "v", "q_lens"] and str(op).endswith(", q_lens")
    assert Forward.from_json(op.to_json()) == op
    found = select(op, TYPICAL["sm_90a"])
    (launch,) = found.kernel.lower(op, found.config, TYPICAL["sm_90a"]).launches
    config = dict(launch.source.headers)["config.cuh"]
    assert "UsedQueries<Dense>" in config and "kv_lens" not in config


@pytest.mark.parametrize("way", ["eager", "compiled", "autocast", "operator"])
def test_torch(way: str) -> None:
    """Autograd gives the gradients of used rows, and 0 for the others, also through the operator."""
    torch = pytest.importorskip("torch")
    case = Case("fp32", 3, 9, 12, 4, 2, head_dim=8, head_dim_v=8, causal=True, sinks=True, lens=((4, 9, 0), (12, 0, 5)))
    inputs, lens = case.inputs("torch", "cpu"), case.used("torch", "cpu")
    (do, dlse), sinks = case.output_gradients("torch", "cpu"), case.sink_logits("torch", "cpu")
    q, k, v = inputs
    case.poison((q,), (k, v))
    given = [x.requires_grad_() for x in (q, k, v, sinks)]

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return rawattn.attention(q, k, v, causal=True, sinks=sinks, **lens, return_lse=True)

    if way == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    if way == "operator":
        spec = json.dumps(Spec.of(causal=True).to_json())
        call = functools.partial(torch.ops.rawattn.attention, spec=spec, **lens)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        o, lse = call(*given)
    assert o.dtype == (torch.bfloat16 if way == "autocast" else torch.float32)
    case.poison((do,), (), (dlse,))
    found = torch.autograd.grad((o, lse), given, (do.to(o.dtype), dlse))
    own = [x.detach().to(o.dtype) for x in (do, q, k, v)]
    wanted = expect_backward(*own, dlse=dlse, causal=True, sinks=sinks.detach(), **lens)
    wanted.check(*(x.to(o.dtype) for x in found[:3]), found[3])


def test_vmap() -> None:
    """A mapped dimension joins the batch, lengths too; those that are the same for all are repeated."""
    torch = pytest.importorskip("torch")
    q, k = torch.randn(3, 2, 5, 1, 8), torch.randn(3, 2, 7, 1, 8)
    q_lens, kv_lens = torch.tensor([[1, 5], [0, 2], [3, 3]], dtype=torch.int32), torch.tensor([7, 4], dtype=torch.int32)

    def loss(q: Any, k: Any, lens: Any) -> Any:
        return (rawattn.attention(q, k, k, q_lens=lens, kv_lens=kv_lens) ** 2).sum()

    found = torch.func.vmap(torch.func.grad(loss, (0, 1)))(q, k, q_lens)
    for i in range(3):
        for x, y in zip(found, torch.func.grad(loss, (0, 1))(q[i], k[i], q_lens[i]), strict=True):
            torch.testing.assert_close(x[i], y)


def test_gradients_of_captured_arrays() -> None:
    """Pairs of used rows alone are in their sums."""
    case = Case("fp32", 2, 9, 12, 2, 1, head_dim=8, head_dim_v=8, lens=((4, 9), (12, 5)))
    (q, k, v), (do, dlse), lens = case.inputs(), case.output_gradients(), case.used()
    bias = np.random.default_rng(1).standard_normal((2, 2, 9, 12)).astype(np.float32)
    o, lse = rawattn.attention(q, k, v, bias=bias, return_lse=True, **lens)
    *wanted, wanted_bias = reference.attention_backward(
        do, q, k, v, dlse=dlse, score=rawattn.score.function(lambda s, b, h, i, j: s + bias[b, h, i, j]), wrt=(bias,), **lens
    )
    case.poison((do, q, o), (k, v), (lse, dlse))
    *found, found_bias = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, bias=bias, wrt=(bias,), **lens)
    for x, y in zip((*found, found_bias), (*wanted, wanted_bias), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
    assert found_bias[0, :, :4].all() and not found_bias[0, :, 4:].any() and not found_bias[1, :, :, 5:].any()


def test_plans_and_explanations() -> None:
    case = Case("fp32", 2, 9, 12, lens=((4, 9), (12, 5)))
    (q, k, v), (do, _), lens = case.inputs(), case.output_gradients(), case.used()
    o, lse = rawattn.attention(q, k, v, return_lse=True, **lens)
    forward = rawattn.plan(q, k, v, return_lse=True, **lens)
    np.testing.assert_array_equal(forward.run(q, k, v, **lens)[0], o)
    plan = rawattn.plan_backward(do, q, k, v, o, lse, **lens)
    for x, y in zip(plan.run(do, q, k, v, o, lse, **lens), rawattn.attention_backward(do, q, k, v, o, lse, **lens), strict=True):
        np.testing.assert_array_equal(x, y)
    assert rawattn.operation.from_json(plan.op.to_json()) == plan.op and str(plan.op).endswith(", q_lens, kv_lens")
    assert "q_lens, kv_lens" in str(rawattn.explain(q, k, v, **lens))
    assert "q_lens, kv_lens" in str(rawattn.explain_backward(do, q, k, v, o, lse, **lens))
    wrong = lens | {"q_lens": np.array([4, 10], np.int32)}
    with pytest.raises(ProblemError, match=r"q_lens\[1\] is 10; it must be from 0 to 9, the sequence's rows of q."):
        rawattn.attention_backward(do, q, k, v, o, lse, **wrong)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("size", [64, 256])
def test_launches_of_gradients(size: int, varlen: bool) -> None:
    """A pass clears the rows that are not used; TMA has maps with ends for each dense sequence."""
    op = backward((size, size), varlen=varlen, q_lens=True)
    launches = select(op, TYPICAL["sm_90a"]).kernel.lower(op, select(op, TYPICAL["sm_90a"]).config, TYPICAL["sm_90a"]).launches
    assert [each.entry for each in launches[: 1 + varlen]] == ["attn_bwd_padding"] * (1 + varlen)
    config = dict(launches[2 + varlen].source.headers)["config.cuh"]
    rows = "CutQueries<Varlen>" if varlen else "CutQueries<DenseSpan>"
    assert f"using Rows = {rows};" in config and ("TmaPageRows q;" in config) == (not varlen)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_attn_fwd_emulated(packed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """NaN behind the keys and values in use reaches no result: TMA brings zeros."""
    pytest.importorskip("torch")
    lengths = ((130, 200), (70, 200)) if packed else None
    case = Case(batch=2, q_len=130, kv_len=200, heads=2, kv_heads=1, causal=True, lengths=lengths, lens=((130, 61), (129, 70)))
    (q, k, v, *starts), lens = case.inputs("torch", "cpu"), case.used("torch", "cpu")
    call = rawattn.attention_varlen if packed else rawattn.attention
    o, lse = call(q, k, v, *starts, **lens, causal=True, return_lse=True)
    case.poison((q,), (k, v))
    gpu.stand_in(monkeypatch, tmp_path, sm_count=3)
    found = call(q, k, v, *starts, **lens, causal=True, return_lse=True, kernel="attn_fwd")
    np.testing.assert_allclose(found[0].float().numpy(), o.float().numpy(), atol=2e-2)
    np.testing.assert_allclose(found[1].numpy(), lse.numpy(), atol=1e-4)


@pytest.mark.slow
def test_a_kept_program_reads_as_many_keys_as_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Steps of a decode loop that one program serves, in splits, over two layers. The keys behind hold NaN."""
    torch = pytest.importorskip("torch")
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 4, 16, generator=rng).bfloat16()
    layers = [torch.randn(1, 700, 2, 16, generator=rng).bfloat16() for _ in range(2)]
    steps = [(600, 0), (601, 1), (513, 0)]
    wanted = [rawattn.attention(q, layers[i][:, :n], layers[1 - i][:, :n], causal=True) for n, i in steps]
    gpu.stand_in(monkeypatch, tmp_path, sm_count=4)
    monkeypatch.setattr(Plan, "resized", lambda *_: pytest.fail("a program was lowered"))
    for (length, layer), o in zip(steps, wanted, strict=True):
        k, v = (layers[i].clone() for i in (layer, 1 - layer))
        k[:, length:], v[:, length:] = torch.nan, torch.nan
        found = rawattn.attention(q, k[:, :length], v[:, :length], causal=True, kernel="attn_fwd_mma")
        np.testing.assert_allclose(found.float().numpy(), o.float().numpy(), atol=2e-2)
