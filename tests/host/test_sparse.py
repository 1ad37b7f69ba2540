"""Scores of blocks and the largest of them, against their definition, on NumPy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError
from rawattn.sparse import top_blocks

torch = pytest.importorskip("torch")


def wanted(q: Any, k: Any, most: int, block_q: int, block_kv: int, causal: bool, score: str, share: bool, sure: Any) -> Any:
    """The lists by loops."""
    (batch, q_len, heads, dim), (kv_len, kv_heads) = q.shape, k.shape[1:3]
    blocks, count = -(-q_len // block_q), -(-kv_len // block_kv)
    lists = np.full((batch, kv_heads if share else heads, blocks, most), -1)
    for b, i in np.ndindex(batch, blocks):
        last = min((i + 1) * block_q, q_len) - 1 + kv_len - q_len
        allowed = [j for j in range(count) if not causal or j * block_kv <= last]
        place = last // block_kv if causal else count - 1
        chances = np.full((heads, count), -np.inf)
        for h in range(heads):
            row = q[b, i * block_q : (i + 1) * block_q, h].mean(0)
            keys = [k[b, j * block_kv : (j + 1) * block_kv, h * kv_heads // heads] for j in range(count)]
            s = np.array([(x @ row).max() if score == "max" else x.mean(0) @ row for x in keys])[allowed] * dim**-0.5
            if len(allowed):
                chances[h, allowed] = np.exp(s - s.max()) / np.exp(s - s.max()).sum()
        for h in range(lists.shape[1]):
            group = heads // lists.shape[1]
            p = chances[h * group : (h + 1) * group].sum(0)
            for j in allowed:
                if j < sure[0] or j > place - sure[1]:
                    p[j] = np.inf
            best = sorted(allowed, key=lambda j: (-p[j], j))[:most]
            lists[b, h, i, : len(best)] = sorted(best)
    return lists


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 70), st.integers(0, 90), st.sampled_from((1, 8, 16)), st.sampled_from((8, 16)), st.integers(1, 6),
    st.booleans(), st.sampled_from(("mean", "max")), st.booleans(), st.integers(0, 2), st.integers(0, 2), st.booleans(),
)  # fmt: skip
def test_definition(
    q_len: int, kv_len: int, block_q: int, block_kv: int, most: int, causal: bool, score: str, share: bool, first: int,
    local: int, ties: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(q_len)
    q, k = rng.standard_normal((2, q_len, 4, 8)), rng.standard_normal((2, kv_len, 2, 8))
    if ties:
        q, k = np.zeros_like(q), np.ones_like(k)
    exact = wanted(q, k, most, block_q, block_kv, causal, score, share, (first, local))
    options = {"causal": causal, "score": score, "share_heads": share, "first": first, "local": local}
    for put in (np.asarray, torch.tensor):
        found = top_blocks(put(q), put(k), most, block_q=block_q, block_kv=block_kv, **options)
        np.testing.assert_array_equal(np.asarray(found.indices), exact)
        np.testing.assert_array_equal(np.asarray(found.counts), (exact >= 0).sum(-1))
        assert str(found.indices.dtype).endswith("int32") and (found.block_q, found.block_kv) == (block_q, block_kv)


def test_lists_that_keep_all_blocks_are_dense_attention() -> None:
    q, k, v = (torch.randn(1, 150, h, 16, requires_grad=True) for h in (4, 2, 2))
    keys = top_blocks(q, k, 5, causal=True, local=1)
    sparse, dense = (rawattn.attention(q, k, v, causal=True, **each) for each in ({"keys": keys}, {}))
    assert torch.allclose(sparse, dense, atol=1e-5)
    sparse.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_nan_is_the_smallest_score() -> None:
    q, k = np.ones((1, 64, 1, 4), np.float32), np.ones((1, 256, 1, 4), np.float32)
    k[0, 70] = np.nan
    assert top_blocks(q, k, 3).indices.tolist() == [[[[0, 2, 3]]]]


@pytest.mark.parametrize("score", ["mean", "max"])
def test_an_infinite_score_is_the_largest(score: str) -> None:
    q, k = np.ones((1, 64, 1, 4), np.float32), np.ones((1, 256, 1, 4), np.float32)
    k[0, 70] = np.inf
    for put in (np.asarray, torch.tensor):
        assert top_blocks(put(q), put(k), 2, score=score).indices.tolist() == [[[[0, 1]]]]
        assert top_blocks(put(q), put(k), 1, score=score).indices.tolist() == [[[[1]]]]


def test_nothing_is_copied_from_the_host() -> None:
    """A copy makes the host wait for the device, and a CUDA graph cannot hold it; meta tensors take none."""
    q, k = (torch.empty(2, 100, heads, 8, device="meta") for heads in (4, 2))
    found = top_blocks(q, k, 2, causal=True, local=1, first=1)
    assert found.indices.device.type == "meta" and found.indices.shape == (2, 2, 2, 2)
    make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
    graph = make_fx(lambda q, k: top_blocks(q, k, 2, causal=True).arrays)(torch.zeros(q.shape), torch.zeros(k.shape))
    assert not [node for node in graph.graph.nodes if node.op == "get_attr" or "lift_fresh" in str(node.target)]


WRONG = {
    "most": ({"most": 0}, "most is 0; it must be an int from 1 up"),
    "local": ({"local": -1}, "local is -1; it must be an int from 0 up"),
    "score": ({"score": "sum"}, "score is 'sum'; it must be one of 'mean', 'max'"),
    "library": ({"k": torch.zeros(1, 9, 2, 8)}, "q is a ndarray and k a Tensor; they must be of torch, CuPy or NumPy, both"),
    "heads": ({"k": np.zeros((1, 9, 3, 8))}, r"q has shape \(1, 5, 4, 8\) and k \(1, 9, 3, 8\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    changes, message = WRONG[name]
    with pytest.raises(ProblemError, match=message):
        top_blocks(**({"q": np.zeros((1, 5, 4, 8)), "k": np.zeros((1, 9, 2, 8)), "most": 2} | changes))
