"""q_lens and kv_lens: sequences that use a part of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, arrays, reference
from rawattn.device import TYPICAL
from rawattn.operation import Forward
from rawattn.select import select
from rawattn.spec import Spec
from rawattn.testing import Case, cases, expect


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
    names = {name: arrays.read(ROWS, name)._replace(device=0) for name in "qkv"}
    op = Forward.of(names | {"q_lens": arrays.read(np.zeros(2, np.int32), "q_lens")._replace(device=0)}, Spec())
    assert [x.name for x in op.inputs] == ["q", "k", "v", "q_lens"] and str(op).endswith(", q_lens")
    assert Forward.from_json(op.to_json()) == op
    found = select(op, TYPICAL["sm_90a"])
    (launch,) = found.kernel.lower(op, found.config, TYPICAL["sm_90a"]).launches
    config = dict(launch.source.headers)["config.cuh"]
    assert "UsedQueries<Dense>" in config and "kv_lens" not in config


def test_torch_traces_none() -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros(2, 5, 1, 8)
    with (
        pytest.raises(ProblemError, match="q_lens or kv_lens was given where torch traces"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        rawattn.attention(q, q, q, q_lens=torch.tensor([1, 2], dtype=torch.int32))
