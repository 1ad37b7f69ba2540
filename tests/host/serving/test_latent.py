"""Latent caches, whose v is the first columns of k, as in MLA: q as a pair of arrays, and new rows with their last columns rotated."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

import rawattn
from rawattn import ProblemError, UnsupportedError, reference
from rawattn.array import reading
from rawattn.driver.device import TYPICAL
from rawattn.operation import AttentionKVCache
from rawattn.runtime.select import select
from rawattn.testing import _move
from tests.caches import Cached, caches

MLA = Cached(((3, 20), (1, 9), (0, 4)), pool="shared", heads=4, head_dim=576, head_dim_v=512, dtype="bf16")


def cut(q: Any, columns: int) -> tuple[Any, Any]:
    return q[..., :columns], q[..., columns:]


def check_pair(case: Cached, library: str = "numpy", **options: Any) -> None:
    """Compares o and lse of a pair with those of one array, bit for bit, and the specification's."""
    q = _move(case.rows(case.heads, case.head_dim, 1), library, "cpu")
    cache, step = case.cache(library), case.step(library)
    pair = cut(q, case.head_dim_v)
    found = rawattn.attention_kvcache(pair, cache, step, return_lse=True, **options)
    wanted = rawattn.attention_kvcache(q, cache, step, return_lse=True, **options)
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape and bool((x == y).all() | (x != x).all())
    exact = reference.attention_kvcache(pair, cache, step, return_lse=True, **options)
    for x, y in zip(exact, reference.attention_kvcache(q, cache, step, return_lse=True, **options), strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=30, deadline=None)
@given(caches())
def test_a_pair_of_any_step(case: Cached) -> None:
    assume(case.head_dim > case.head_dim_v)
    check_pair(dataclasses.replace(case, pool="shared"), window=case.window, softcap=case.softcap)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_pair(library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    check_pair(MLA, library)
    check_pair(dataclasses.replace(MLA, dtype="fp16", ragged=False, lengths=((2, 7), (2, 3)), page_size=1), library)
    check_pair(MLA, library, score=lambda s, b, h, q, kv: s + 0.1 * (q - kv))


def test_a_pair_by_plan_and_operator() -> None:
    torch = pytest.importorskip("torch")
    q, cache, step = _move(MLA.rows(4, 576, 1), "torch", "cpu"), MLA.cache("torch"), MLA.step("torch")
    pair = cut(q, 512)
    wanted = rawattn.attention_kvcache(q, cache, step)
    assert torch.equal(rawattn.plan_kvcache(pair, cache, step).run(pair, cache, step), wanted)
    args = cache.k, cache.v, step.kv_lens, step.page_table, step.cu_seqlens_q
    causal = {"spec": json.dumps(rawattn.Spec(rawattn.mask.Causal()).to_json())}
    assert torch.equal(torch.ops.rawattn.attention_kvcache(pair[0], *args, q_rope=pair[1], **causal)[0], wanted)
    fakes = [x.to("meta") for x in (*pair, *args)]
    o, lse = torch.ops.rawattn.attention_kvcache(fakes[0], *fakes[2:], q_rope=fakes[1], **causal)
    assert (o.shape, o.dtype, lse.shape) == (wanted.shape, wanted.dtype, (4, 4))
    with pytest.raises(ProblemError, match=r"q_rope has shape \(4, 4, 63\); it must be \(4, 4, 64\)"):
        torch.ops.rawattn.attention_kvcache(fakes[0], *fakes[2:], q_rope=fakes[1][..., :63])
    compiled = torch.compile(lambda a, b: rawattn.attention_kvcache((a, b), cache, step), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*pair), wanted)


def test_wrong_pairs() -> None:
    q, cache, step = MLA.rows(4, 576, 1), MLA.cache(), MLA.step()
    nope, rope = cut(q, 512)
    for pair, message in (
        ((nope,), r"q is a tuple of 1; it must be one array, or the pair \(q_nope, q_rope\)\."),
        ((nope, rope, rope), r"q is a tuple of 3;"),
        (list((nope, rope[:2])), r"q_rope has shape \(2, 4, 64\); it must be \(4, 4, 64\), by the rows of q_nope and the cache's 512"),
        ((q, rope), r"q_nope has shape \(4, 4, 576\); it must be \(4, 4, 512\)"),
        ((nope, rope.astype("float32")), r"q_rope has dtype fp32 but q_nope has bf16; they must be the same\."),
        ((nope, np.repeat(rope, 2, -1)[..., ::2]), r"q_rope has a stride of 2 in its last dimension"),
    ):
        with pytest.raises(ProblemError, match=message):
            rawattn.attention_kvcache(pair, cache, step)
    for other in (dataclasses.replace(MLA, pool="apart"), dataclasses.replace(MLA, pool="interleaved")):
        with pytest.raises(ProblemError, match=r"q is a pair, \(q_nope, q_rope\), but the cache's v is not the first columns"):
            rawattn.attention_kvcache((nope, rope), other.cache(), step)
    k = cache.k
    with pytest.raises(ProblemError, match="not the first columns"):
        rawattn.attention_kvcache((nope, rope), rawattn.KVCache(k, k[..., 64:]), step)
    plan = rawattn.plan_kvcache(q, cache, step)
    with pytest.raises(ProblemError, match="q is a numpy bf16 array of shape"):
        plan.run((nope, rope), cache, step)


def test_a_pair_in_words_and_on_a_gpu() -> None:
    q, cache, step = MLA.rows(4, 576, 1), MLA.cache(), MLA.step()
    text = str(rawattn.explain_kvcache(cut(q, 512), cache, step))
    assert "head_dim 576/512" in text and text.splitlines()[0].endswith("q_rope")
    rows = {name: reading.read(x, name) for name, x in zip(("q", "q_rope"), cut(q, 512), strict=True)}
    op = AttentionKVCache.of(rows | cache.arrays_of(step.batch) | step.arrays, rawattn.Spec())
    assert op.q_rope and [x.shape[-1] for x in op.inputs[:2]] == [512, 64] and op.kind != dataclasses.replace(op, q_rope=False).kind
    assert AttentionKVCache.from_json(op.to_json()) == op
    with pytest.raises(UnsupportedError, match=r"q is a pair, \(q_nope, q_rope\); it takes one array of all columns"):
        select(op, TYPICAL["sm_90a"])

