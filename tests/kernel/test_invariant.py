"""``invariant=True`` on a GPU: a row has the same bits alone, with others beside it, packed, and over a cache in any step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn.testing import _move
from tests.caches import Cached
from tests.kernel.test_kvcache import CHUNK, DRAFT, STEP, attend, check

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu("any")
KERNELS = [None, "attn_fwd", "attn_fwd_mma", "attn_fwd_simt"]


def normal(*shape: int, seed: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), dtype=dtype, device="cuda")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_alone(kernel: str | None, data: Any) -> None:
    """Of few kinds, which are compiled once. Logits differ by hundreds, so that votes would decide otherwise with others."""
    n, m = data.draw(st.integers(1, 300)), data.draw(st.sampled_from((1, 63, 64, 65, 128, 129, 400, 2500)) | st.integers(1, 900))
    n, batch, kv_heads = min(n, m), data.draw(st.integers(1, 9)), data.draw(st.sampled_from((1, 2, 8)))
    heads, left = kv_heads * data.draw(st.sampled_from((1, 2, 4))), data.draw(st.integers(0, 700))
    at, of = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, batch - 1))
    options = {"causal": True, "window": (left, 0), "softcap": 20.0, "return_lse": True, "invariant": True, "kernel": kernel}
    seed, factor = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from((1.0, 40.0)))
    q, k, v = (
        normal(batch, rows, h, 64, seed=seed + i) for i, (rows, h) in enumerate(((n, heads), (m, kv_heads), (m, kv_heads)))
    )
    k *= factor * torch.linspace(0, 1, m, device="cuda", dtype=k.dtype)[:, None, None]
    o, lse = rawattn.attention(q, k, v, **options)
    end = m - n + at + 1
    one = [x[of : of + 1, rows].clone() for x, rows in ((q, slice(at, at + 1)), (k, slice(end)), (v, slice(end)))]
    alone = rawattn.attention(*one, **options)
    assert torch.equal(alone[0][0, 0], o[of, at]) and torch.equal(alone[1][0, :, 0], lse[of, :, at])
    some = rawattn.attention(q[of : of + 1, at:].clone(), k[of : of + 1].clone(), v[of : of + 1].clone(), **options)
    assert torch.equal(some[0][0], o[of, at:]) and torch.equal(some[1][0], lse[of, :, at:])
    starts = [torch.tensor([0, *range(3, 3 + batch * x + 1, x)], dtype=torch.int32, device="cuda") for x in (n, m)]
    packed = [torch.cat([normal(3, x.shape[2], 64, seed=7), x.flatten(0, 1)]) for x in (q, k, v)]
    found = rawattn.attention_varlen(*packed, *starts, **options)
    assert torch.equal(found[0][3:].view_as(o), o)
    assert torch.equal(found[1][:, 3:].view(heads, batch, n).transpose(0, 1), lse)


@pytest.mark.parametrize("options", [{"sinks": True}, {"constant_time": True}, {"scale": -0.3}, {"kv_lens": True}], ids=str)
def test_other_options(options: dict[str, Any]) -> None:
    q, k, v = normal(3, 200, 8, 128, seed=1), normal(3, 500, 2, 128, seed=2), normal(3, 500, 2, 128, seed=3)
    given: dict[str, Any] = {"causal": "kv_lens" not in options, "invariant": True} | options
    given |= {"sinks": normal(8, seed=4, dtype=torch.float32)} if "sinks" in options else {}
    lengths = torch.tensor([500, 77, 300], dtype=torch.int32, device="cuda")
    given |= {"kv_lens": lengths} if "kv_lens" in options else {}
    o = rawattn.attention(q, k, v, **given)
    given |= {"kv_lens": lengths[1:2]} if "kv_lens" in options else {}
    assert torch.equal(rawattn.attention(q[1:2, -1:].clone(), k[1:2].clone(), v[1:2].clone(), **given)[0, 0], o[1, -1])


def alone(case: Cached, i: int, **more: Any) -> tuple[Any, Any]:
    """o and lse of a sequence by itself, in the same cache."""
    q, step, begin = case.rows(case.heads, case.head_dim, 1), case.step("torch"), sum(n for n, _ in case.lengths[:i])
    rows = q[begin : begin + case.lengths[i][0]] if case.ragged else q[i]
    starts = torch.tensor([0, len(rows)], dtype=torch.int32, device="cuda")
    one = rawattn.Step(step.kv_lens[i : i + 1].clone(), step.page_table[i : i + 1].clone(), starts, max_q_len=max(1, len(rows)))

    options = {"window": case.window, "return_lse": True, "invariant": True} | more
    return rawattn.attention_kvcache(_move(rows, "torch", "cuda"), case.cache("torch"), one, **options)  # type: ignore[no-any-return]


def same_as_alone(case: Cached, found: tuple[Any, Any], **more: Any) -> None:
    begin = 0
    for i, (q_len, _) in enumerate(case.lengths):
        if q_len:
            o, lse = alone(case, i, **more)
            assert torch.equal(o, found[0][begin : begin + q_len]), i
            assert torch.equal(lse, found[1][:, begin : begin + q_len]), i
        begin += q_len


@pytest.mark.parametrize("pages", [16, 4], ids=["attn_fwd", "attn_fwd_mma"])
def test_chunks_beside_decoding(pages: int) -> None:
    """Two launches, each of which has its own sequences; both are right."""
    case = dataclasses.replace(CHUNK, page_size=pages)
    found = attend(case, invariant=True)
    check(case, found)
    same_as_alone(case, found)
    assert rawattn.violations() == ()


def test_drafts_have_the_bits_of_any_bound() -> None:
    """Of 4 rows in a step that allows 32, and alone."""
    case = dataclasses.replace(
        DRAFT, ragged=True, lengths=tuple(zip((1, 8, 2, 0, 4, 1, 3), (kv for _, kv in STEP.lengths), strict=True))
    )
    for more in ({}, {"split": 256}):
        found = attend(case, invariant=True, **more)
        check(case, found)
        same_as_alone(case, found, **more)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_step(data: Any) -> None:
    rows = st.sampled_from((0, 1, 4, 31, 32, 33, 64, 65, 128, 129)) | st.integers(0, 300)
    lengths = st.tuples(rows, st.sampled_from((0, 1, 63, 64, 65, 255, 257, 2100)) | st.integers(0, 1500))
    kv_heads, group = data.draw(st.sampled_from((1, 2, 8))), data.draw(st.sampled_from((1, 2, 8)))
    case = dataclasses.replace(
        CHUNK, lengths=tuple(data.draw(st.lists(lengths, min_size=1, max_size=5))), kv_heads=kv_heads, heads=kv_heads * group,
        page_size=data.draw(st.sampled_from((16, 64))), window=(data.draw(st.integers(0, 1600)), 0), head_dim=64, head_dim_v=64,
        seed=data.draw(st.integers(0, 2**31)),
    )  # fmt: skip
    found = attend(case, invariant=True)
    check(case, found)
    same_as_alone(case, found)
