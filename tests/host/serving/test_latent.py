"""Latent caches, whose v is the first columns of k, as in MLA: q as a pair of arrays, new rows with the last columns rotated."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

import rawattn
from rawattn import ProblemError, Rotary, UnsupportedError, reference
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
        (
            [nope, rope[:2]],
            r"q_rope has shape \(2, 4, 64\); it must be \(4, 4, 64\), by the rows of q_nope and the cache's 512",
        ),
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
    assert (
        op.q_rope and [x.shape[-1] for x in op.inputs[:2]] == [512, 64] and op.kind != dataclasses.replace(op, q_rope=False).kind
    )
    assert AttentionKVCache.from_json(op.to_json()) == op
    assert {select(op, TYPICAL[arch]).kernel.name for arch in ("sm_90a", "sm_80")} == {"attn_fwd_mma"}
    with pytest.raises(UnsupportedError, match=r"q is a pair, \(q_nope, q_rope\); it takes one array of all columns"):
        select(op, TYPICAL["sm_90a"], "attn_decode")


NEW = Cached(((3, 9), (0, 5), (4, 0), (1, 1), (2, 30)), pool="shared", heads=4, head_dim=576, head_dim_v=512, dtype="bf16")


def rotary_of(case: Cached, library: str = "numpy", interleaved: bool = True, positions: Any = None) -> Rotary:
    cos, sin = (_move(np.asarray(case.normal(40, 32, seed=seed), np.float32), library, "cpu") for seed in (5, 6))
    return Rotary(cos, sin, interleaved, positions, first_column=512)


def check_append(case: Cached, library: str, q: Any, interleaved: bool, slots: Any = None, call: Any = rawattn.append) -> None:
    """Appends latent rows with the last 64 columns rotated, and compares with the specification and by hand."""
    k, q = _move(case.rows(1, 576, 1), library, "cpu"), None if q is None else _move(q, library, "cpu")
    cache, step = case.made(*case.pools(), library), case.step(library)
    slots = None if slots is None else _move(slots, library, "cpu")
    options = {"slots": slots, "rotary": rotary_of(case, library, interleaved), "q": q}
    wanted = reference.append(cache, step, k, None, **options)
    found = call(cache, step, k, None, **options)
    with np.errstate(all="ignore"):
        results = [x for x in (cache.k, cache.v, found) if x is not None]
        numbers = [np.asarray(x.double() if library == "torch" else x, np.float64) for x in results]
    steps = {"bf16": 2.0**-8, "fp16": 2.0**-11}[case.dtype]
    eps = (0.125, 0.002) if case.kv_dtype else (steps, steps)
    for x, exact in zip(numbers, wanted, strict=True):
        written = ~np.isnan(exact)
        np.testing.assert_allclose(x[written], exact[written], rtol=eps[0], atol=4 * eps[1])
        assert x is numbers[2] if len(numbers) > 2 and x.shape == numbers[2].shape else np.isnan(x[~written]).all()
    if case.kv_dtype or slots is not None or case.layout == "HND":
        return
    row, angles = case.pages()[0][8 // case.page_size], options["rotary"]
    stored = numbers[0][row, 8 % case.page_size, 0]
    given = np.asarray(case.rows(1, 576, 1)[2, 0], np.float64)
    np.testing.assert_array_equal(stored[:512], given[:512])
    cos, sin = (np.asarray(x, np.float64)[8] for x in (angles.cos, angles.sin))
    a, b = (given[512::2], given[513::2]) if interleaved else (given[512:544], given[544:])
    first, second = (stored[512::2], stored[513::2]) if interleaved else (stored[512:544], stored[544:])
    np.testing.assert_allclose(first, a * cos - b * sin, atol=0.05)
    np.testing.assert_allclose(second, b * cos + a * sin, atol=0.05)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_append_rotates_the_last_columns(library: str, interleaved: bool) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    rows, slots = NEW.rows(4, 576, 3), np.array([5, -1, 0, 9, 2, 44, 3, -7, 1, 11])
    for q in (None, rows, rows[..., 512:]):
        check_append(NEW, library, q, interleaved)
    for change in ({"layout": "HND"}, {"form": "indptr", "page_size": 1}, {"kv_dtype": "e4m3", "scales": ("number", "number")}):
        check_append(dataclasses.replace(NEW, **change), library, rows[..., 512:], interleaved)
    check_append(dataclasses.replace(NEW, dtype="fp16"), library, None, interleaved, slots)


def test_append_by_the_operator() -> None:
    torch = pytest.importorskip("torch")
    compiled = torch.compile(rawattn.append, backend="aot_eager", fullgraph=True)
    for q in (NEW.rows(4, 576, 3), NEW.rows(4, 64, 3)):
        check_append(NEW, "torch", q, True, call=compiled)


def test_a_kept_call_has_one_first_column() -> None:
    torch = pytest.importorskip("torch")
    cos, sin = rotary_of(NEW, "torch").cos, rotary_of(NEW, "torch").sin
    k, q = torch.from_numpy(np.ones((10, 1, 576), np.float32)), torch.from_numpy(np.ones((10, 4, 576), np.float32))
    case = dataclasses.replace(NEW, dtype="fp32")
    for first in (512, 500, 512, 0):
        turned = rawattn.append(
            case.made(*case.pools(), "torch"), case.step("torch"), k, None, rotary=Rotary(cos, sin, first_column=first), q=q
        )
        assert (turned[0] != 1).any(0).nonzero()[0].item() == first


def test_attention_append_of_a_pair() -> None:
    """A pair and one array give the same, token by token and at once; q_nope stays as it is."""
    case = dataclasses.replace(NEW, lengths=((5, 5), (2, 9)), dtype="fp32")
    q, k, rotary = case.rows(4, 576, 3), case.rows(1, 576, 1), rotary_of(case)
    caches = [case.made(*case.pools()) for _ in range(2)]
    for cache in caches:
        cache.k[...] = 0  # the keys before the new ones
    o = rawattn.attention_append(q, k, None, caches[0], case.step(), rotary=rotary)
    pair = rawattn.attention_append(cut(q, 512), k, None, caches[1], case.step(), rotary=rotary)
    np.testing.assert_array_equal(o, pair)
    np.testing.assert_array_equal(caches[0].k, caches[1].k)
    turned = rawattn.append(caches[0], case.step(), None, None, rotary=rotary, q=q)
    np.testing.assert_allclose(o, reference.attention_kvcache(turned, caches[0], case.step()), atol=1e-5)
    plain = rawattn.attention_append(cut(q, 512), k, None, caches[1], case.step())
    assert plain.shape == o.shape and not np.allclose(plain, o)


def test_wrong_columns() -> None:
    cache, step, k, cos = NEW.made(*NEW.pools()), NEW.step(), NEW.rows(1, 576, 1), np.ones((40, 32), np.float32)
    q = NEW.rows(4, 576, 3)
    for first, message in (
        (-1, "first_column is -1; it must be an int from 0 up."),
        (1.0, "first_column is 1.0;"),
        (True, "first_column is True;"),
    ):
        with pytest.raises(ProblemError, match=message):
            Rotary(cos, cos, first_column=first)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match=r"cos has 32 columns, for 64 of a head behind first_column, 513; k has head"):
        rawattn.append(cache, step, k, None, rotary=Rotary(cos, cos, first_column=513))
    with pytest.raises(ProblemError, match=r"q has shape \(10, 4, 64\); it must be \(10, 4, 576\), by the rows and columns of k"):
        rawattn.append(cache, step, k, None, rotary=Rotary(cos, cos, first_column=508), q=q[..., 512:])
    with pytest.raises(ProblemError, match="and the rotary's first_column 0; it must be 512, where q_rope begins"):
        rawattn.attention_append(cut(q, 512), k, None, cache, step, rotary=Rotary(cos, cos))
    assert np.isnan(np.asarray(cache.k, np.float32)).all()  # nothing was written
