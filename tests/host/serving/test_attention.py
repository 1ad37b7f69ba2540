"""Attention over caches, on the CPU, against its definition; every wrong argument. And the operations over caches as values."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import rawattn
from rawattn import KVCache, ProblemError, Rotary, Step, UnsupportedError, reference
from rawattn.array import reading
from rawattn.operation import Append, AttentionKVCache
from rawattn.runtime import record
from rawattn.testing import expect
from rawattn.variant.element import E4M3, ELEMENTS, FP8
from tests.caches import Cached, caches
from tests.host.serving.test_append import COS, NEW
from tests.host.serving.test_cache import CACHE, EIGHT, INT, LENS, OTHERS, SCALED, STEP, TABLE, Q, lens, pool


def check(case: Cached, library: str = "numpy") -> None:
    """Compares o and lse of each sequence with attention of its keys, gathered."""
    from rawattn.testing import _move

    q = case.rows(case.heads, case.head_dim, 1)
    cache, step = case.cache(library), case.step(library, nonsense_before=True)
    sinks = case.sink_logits()
    options: dict[str, Any] = {"window": case.window, "softcap": case.softcap}
    given_sinks = None if sinks is None else _move(sinks, library, "cpu")
    found = rawattn.attention_kvcache(_move(q, library, "cpu"), cache, step, sinks=given_sinks, return_lse=True, **options)
    o, lse = (np.asarray(x.double() if library == "torch" else x.astype(np.float64)) for x in found)
    exact = reference.attention_kvcache(q, cache, step, sinks=sinks, return_lse=True, **options)
    assert o.shape == exact[0].shape and lse.shape == exact[1].shape
    for i, (q_len, _) in enumerate(case.lengths):
        k, v = case.keys(i)
        wanted = expect(case.of(q, i)[None], k[None], v[None], mask=case.mask(i), softcap=case.softcap, sinks=sinks)
        lse_i = lse[i] if not case.ragged else case.of(lse.T, i).T
        wanted.check(case.of(o, i)[None], lse_i[None])
        np.testing.assert_allclose(case.of(exact[0], i)[None], wanted.o, rtol=1e-9, atol=1e-12)
        assert q_len == case.of(o, i).shape[0]


@settings(max_examples=120, deadline=None)
@given(caches())
def test_attention(case: Cached) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_attention_of_torch(dtype: str) -> None:
    pytest.importorskip("torch")
    check(Cached(((3, 20), (0, 7), (1, 0), (5, 3)), dtype=dtype, pool="interleaved", layout="HND", sinks=True), "torch")
    check(Cached(((2, 20), (2, 9)), ragged=False, form="dense", page_size=33, dtype=dtype, pool="shared", causal=(0, 1)), "torch")


@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_caches_of_eight_bits(kv_dtype: str, library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    for dtype, scales in (("fp32", ("each", "heads")), ("bf16", ("number", "sequences")), ("fp16", ("all", ""))):
        case = Cached(((3, 20), (0, 7), (1, 0), (5, 3)), dtype=dtype, kv_dtype=kv_dtype, scales=scales, heads=4, kv_heads=2)
        check(case, library)
        check(dataclasses.replace(case, pool="shared", layout="HND", window=(4, 0), sinks=True), library)


def test_long_sequences_in_threads() -> None:
    """Several tiles of keys and units of queries, of a page size that cuts tiles in any place."""
    check(Cached(((70, 700), (1, 1000), (300, 301)), page_size=8, heads=8, kv_heads=2, head_dim=64, head_dim_v=32))
    check(Cached(((40, 900),), page_size=64, heads=16, kv_heads=2, head_dim=64, window=(100, 0), softcap=3.0))


def test_a_score_without_loops() -> None:
    class Twice(rawattn.score.Scale):
        def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
            return 2 * s + 0.1 * kv

    case = Cached(((3, 20), (2, 30)), window=(5, 2))
    q, step = case.rows(2, 16, 1), case.step(nonsense_before=True)
    o = rawattn.attention_kvcache(q, case.cache(), step, window=case.window, score=Twice())
    np.testing.assert_allclose(
        o, reference.attention_kvcache(q, case.cache(), step, window=case.window, score=Twice()), atol=1e-6
    )


def test_page_sizes_and_forms_have_the_same_bits() -> None:
    case = Cached(((3, 64), (1, 33)), heads=4, kv_heads=2)
    q = case.rows(4, 16, 1)
    wanted = rawattn.attention_kvcache(q, case.cache(), case.step())
    for form, size in (("table", 1), ("table", 16), ("indptr", 2), ("indptr", 64), ("dense", 77)):
        other = dataclasses.replace(case, form=form, page_size=size, seed=case.seed)
        assert np.array_equal(rawattn.attention_kvcache(q, other.cache(), other.step()), wanted)
    alone = dataclasses.replace(case, lengths=case.lengths[:1])
    assert np.array_equal(rawattn.attention_kvcache(q[:3], alone.cache(), alone.step()), wanted[:3])


def test_rows_of_no_sequence_are_left() -> None:
    case = Cached(((2, 5),))
    q = np.concatenate([case.rows(2, 16, 1), np.full((3, 2, 16), np.nan, np.float32)])
    out, lse = np.full((5, 2, 16), 7, np.float32), np.full((2, 5), 7, np.float32)
    found = rawattn.attention_kvcache(q, case.cache(), case.step(), out=out, return_lse=True, lse=lse)
    assert found[0] is out and found[1] is lse
    assert (out[2:] == 7).all() and (lse[:, 2:] == 7).all() and (out[:2] != 7).all() and (lse[:, :2] != 7).all()


def test_shared_pages() -> None:
    """Two sequences with one page, a prefix of both."""
    k = np.random.default_rng(0).standard_normal((3, 4, 1, 8), np.float32)
    cache, step = KVCache(k, k.copy()), Step(np.array([6, 7], INT), np.array([[1, 0], [1, 2]], INT))
    q = np.ones((2, 1, 2, 8), np.float32)
    np.testing.assert_allclose(rawattn.attention_kvcache(q, cache, step), reference.attention_kvcache(q, cache, step), atol=1e-6)


RAGGED = Step(LENS, TABLE, lens(0, 1, 2))
MASK = rawattn.mask.Causal("top_left")
CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("cache", {"cache": pool()}, "cache is a ndarray; it must be a rawattn.KVCache."),
    ("step", {"step": LENS}, "step is a ndarray; it must be a rawattn.Step."),
    ("no step", {"step": None}, "step is None; it must be a rawattn.Step."),
    ("q's dtype", {"q": Q.astype(np.float64)}, "q has dtype fp64 but the cache has fp32; they must be the same."),
    ("q in eight bits", {"cache": KVCache(*EIGHT), "q": Q.astype(E4M3.dtype)}, "q has dtype e4m3; it must be bf16, fp16, fp32 o"),
    ("scales of others", {"cache": OTHERS}, "v_scale is for 3 sequences but the call has 2; its first dimension of two must be "),
    ("q's integers", {"q": Q.astype(INT)}, "q has dtype int32; it must be bf16, fp16, fp32 or fp64."),
    ("q's columns", {"q": Q[..., :4].copy()}, "q has head_dim 4 but the cache has 8; they must be the same."),
    ("q's heads", {"q": Q[:, :, :3].copy()}, "q has 3 heads but the cache has 2; those of q must be a multiple of the cache's."),
    ("q's rank", {"q": Q[0]}, "q has 3 dimensions, (1, 4, 8); it must be (batch, length, heads, head_dim) without cu_seqlens_q."),
    ("q's rank, ragged", {"step": RAGGED}, "q has 4 dimensions, (2, 1, 4, 8); it must be (total, heads, head_dim) beside cu_seq"),
    ("batch", {"q": Q[:1]}, "q has batch 1 but the step 2 sequences; they must be the same."),
    ("max_q_len", {"step": Step(LENS, TABLE, max_q_len=0)}, "max_q_len is 0 but q has 1 rows for each sequence; it must be a bo"),
    ("dense", {"step": Step(lens(*[1] * 7)), "q": np.zeros((7, 1, 4, 8), np.float32)}, "the cache has 6 pages but the step 7 se"),
    ("page size", {"cache": KVCache(pool(6, 3, 2, 8), pool(6, 3, 2, 8))}, "the cache has page_size 3; it must be a power of two"),
    ("sinks", {"sinks": np.zeros(2, np.float32)}, "sinks is fp32 of shape (2,); it must be fp32 of shape (4,), one for each hea"),
    ("split", {"split": 100}, "split is 100; it must be 'auto', 'even' or a power of two from 64."),
    ("mask", {"mask": MASK}, "and the step is causal besides; make the step with causal=False."),
    ("mask and window", {"mask": rawattn.mask.Window(3), "window": (3, 0)}, "mask was given beside causal or window"),
    ("mask of each", {"mask": MASK, "step": Step(LENS, TABLE, causal=lens(0, 1))}, "and the step is causal besides"),
    ("out's shape", {"out": np.zeros((2, 1, 4, 9), np.float32)}, "out is a numpy fp32 array of shape (2, 1, 4, 9) on the CPU; i"),
    ("out is q", {"out": Q}, "out overlaps q in memory; give an array of its own."),
    ("lse alone", {"lse": np.zeros((2, 4, 1), np.float32)}, "lse was given without return_lse=True."),
    ("bias", {"bias": Q}, "bias was given, whose keys would be those of one length, and sequences in a cache grow; capture it"),
    ("dropout", {"dropout": 0.1}, "dropout is 0.1; it is for training, and attention over a cache has none: leave it out."),
    ("kernel", {"kernel": "attn_decode"}, "no kernel computes AttentionKVCache"),
    ("long", {"step": Step(lens(3, 13), TABLE)}, "kv_lens[1] is 13; it must be from 0 to 12, what max_kv_len and the pages of a"),
    ("negative", {"step": Step(lens(-1, 3), TABLE)}, "kv_lens[0] is -1; it must be from 0 to 12"),
    ("max_kv_len", {"step": Step(lens(3, 5), TABLE, max_kv_len=4)}, "kv_lens[1] is 5; it must be from 0 to 4"),
    ("page", {"step": Step(lens(3, 9), TABLE)}, "page_table[1, 2] is 9; it must be a page of the cache, from 0 to 5."),
    ("begins", {"step": Step(LENS, TABLE, kv_begin=lens(0, -1))}, "kv_begin[1] is -1; it must be from 0 to "),
    ("CSR", {"step": Step.from_indptr(lens(0, 2, 1), lens(1, 2), lens(1, 1))}, "indptr is [0 2 1]; it must never fall"),
    ("CSR's end", {"step": Step.from_indptr(lens(0, 2, 3), lens(1, 2), lens(1, 1))}, "and lie within the 2 indices."),
    ("CSR's page", {"step": Step.from_indptr(lens(0, 1, 2), lens(1, 7), lens(1, 1))}, "indices[1] is 7; it must be a page of"),
    ("CSR's last", {"step": Step.from_indptr(lens(0, 1, 2), lens(1, 2), lens(1, 5))}, "last_page_len[1] is 5; it must be from 1"),
    ("rows", {"q": Q[:, 0], "step": Step(LENS, TABLE, lens(0, 1, 3))}, "cu_seqlens_q is [0 1 3]; it must begin with 0, never fa"),
    ("q bound", {"q": Q[:, 0], "step": Step(LENS, TABLE, lens(0, 2, 2), max_q_len=1)}, "cu_seqlens_q has 2 rows for sequence 0;"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), [x[1:] for x in CALLS], ids=[x[0] for x in CALLS])
def test_wrong_calls(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ProblemError, UnsupportedError)) as error:
        rawattn.attention_kvcache(**{"q": Q, "cache": CACHE, "step": STEP, **given})
    assert message in str(error.value)
    if not {"bias", "dropout"}.isdisjoint(given):
        for call in (rawattn.plan_kvcache, rawattn.explain_kvcache):
            with pytest.raises(ProblemError) as error:
                call(Q, CACHE, STEP, **given)
            assert message in str(error.value)


def test_a_bias_by_the_way_that_the_message_names() -> None:
    bias = np.random.default_rng(0).standard_normal((2, 4, 12, 12)).astype(np.float32)
    filled = KVCache(*np.random.default_rng(1).standard_normal((2, *pool().shape)).astype(np.float32))
    found = rawattn.attention_kvcache(Q, filled, STEP, score=lambda s, b, h, q, kv: s + bias[b, h, q, kv], dropout=0.0)
    plain = rawattn.attention_kvcache(Q, filled, STEP)
    assert np.isfinite(found).all() and not np.allclose(found, plain)


def test_torch_refuses() -> None:
    torch = pytest.importorskip("torch")
    k, q = torch.zeros(2, 4, 2, 8), torch.zeros(2, 1, 4, 8)
    cache, step = KVCache(k, k.clone()), Step(torch.tensor(LENS))
    for bad in (q.numpy(), q.clone().requires_grad_()):
        with pytest.raises(ProblemError, match=r"one library|requires grad"):
            rawattn.attention_kvcache(bad, cache, step)
    with pytest.raises(ProblemError, match="share one place in memory"):
        rawattn.append(KVCache(k[:, :, :1].expand(2, 4, 2, 8), k.clone()), step, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ProblemError, match="kv_lens has dtype int64"):
        Step(torch.tensor([1, 2]))
    small = k.to(torch.float8_e4m3fn)
    scaled = KVCache(small, small.clone(), k_scale=torch.ones(2, requires_grad=True))
    for call in (
        lambda: rawattn.attention_kvcache(q, scaled, step),
        lambda: rawattn.append(scaled, step, q[:, :, :2], q[:, :, :2]),
    ):
        with pytest.raises(ProblemError, match="requires grad"):
            call()
    with pytest.raises(ProblemError, match="k_scale is inf; it must be above 0, and finite"):
        KVCache(small, small.clone(), k_scale=10**400)


def test_what_a_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from rawattn.driver.device import TYPICAL

    monkeypatch.setattr("rawattn.serving.call.device_of", lambda array: TYPICAL["sm_90a"])
    monkeypatch.setattr("rawattn.runtime.call_cache._calls", {})
    with pytest.raises(UnsupportedError, match=r"(?s)AttentionKVCache fp32 batch 2.*it takes bf16 and fp16, not fp32"):
        rawattn.attention_kvcache(Q, CACHE, STEP)


# ---- operations


def test_operations_as_values() -> None:
    spec = rawattn.Spec.of(causal=True, window=(9, 0), softcap=3.0, return_lse=True)
    found = {"q": reading.read(Q, "q"), "k_cache": CACHE.arrays["k"], "v_cache": CACHE.arrays["v"], **STEP.arrays}
    op = AttentionKVCache.of(found, spec, max_kv_len=8, split_keys=256)
    assert (op.batch, op.q_len, op.kv_len, op.table, op.total_q, op.kv_element) == (2, 1, 8, 3, 2, ELEMENTS["fp32"])
    assert AttentionKVCache.from_json(op.to_json()) == op and hash(op) == hash(AttentionKVCache.from_json(op.to_json()))
    assert [x.name for x in op.inputs] == ["q", "k_cache", "v_cache", "kv_lens", "page_table"]
    assert [x.name for x in op.outputs] == ["o", "lse"] and op.outputs[1].shape == (2, 4, 1)
    assert op.flops == 2 * 16 * 2 * 4 * 8 and op.bytes == 2 * 8 * 2 * 16 * 4 + 4 * (64 + 2 + 6 + 64 + 8)
    assert str(op).startswith("AttentionKVCache fp32 batch 2, length 1x8, heads 4/2, head_dim 8, 6 pages of 4, And(")
    assert (
        op.kind == dataclasses.replace(op, batch=7, kv_len=3, table=9, pages=99).kind != dataclasses.replace(op, sinks=True).kind
    )
    eight = AttentionKVCache.of({**found, **SCALED.arrays_of(2)}, spec, scales=(0.5, 1.0))
    assert [x.name for x in eight.inputs][-1] == "v_scale" and eight.inputs[-1].shape == (2, 2, 1)
    assert AttentionKVCache.from_json(eight.to_json()) == eight and str(eight).startswith(
        "AttentionKVCache fp32 over e4m3 batch 2"
    )
    assert eight.bytes == 2 * 12 * 2 * 16 + 4 * (64 + 2 + 6 + 64 + 8 + 4)
    kinds = {dataclasses.replace(eight, **{name: not getattr(eight, name)}).kind for name in ("k_scales", "v_scales")}
    assert eight.kind == dataclasses.replace(eight, k_scale=3.0).kind not in kinds and len(kinds) == 2
    given = {"k": reading.read(NEW, "k"), "v": reading.read(NEW, "v"), **found}
    stored = Append.of({name: x for name, x in given.items() if name != "q"} | SCALED.arrays_of(2))
    assert Append.from_json(stored.to_json()) == stored and str(stored).startswith("Append fp32 over e4m3 2 rows")
    assert stored.kind != dataclasses.replace(stored, k_scales=True).kind and [x.name for x in stored.inputs][-1] == "v_scale"
    rotary = Rotary(COS, COS)
    new = Append.of(given | rotary.arrays, "neox")
    assert Append.from_json(new.to_json()) == new
    assert [x.name for x in new.inputs] == ["k", "v", "k_cache", "v_cache", "kv_lens", "page_table", "cos", "sin", "q"]
    assert [x.name for x in new.inputs if x.role == "inout"] == ["k_cache", "v_cache"]
    assert [x.name for x in new.outputs] == ["q_out"] and not dataclasses.replace(new, in_place=True).outputs
    assert new.flops == 3 * 2 * 6 * 8 and new.bytes == 4 * (2 * 64 + 2 * 64 + 2 + 6)
    assert str(new) == "Append fp32 2 rows in 2 sequences, kv_heads 2, head_dim 8, 6 pages of 4, neox rotary of 8, q with 4 heads"
    for wrong in ({"form": "list"}, {"form": "table", "page_size": 3}):
        with pytest.raises(ProblemError):
            dataclasses.replace(op, **wrong)
    with pytest.raises(ProblemError, match="rotary is 'gptj'"):
        dataclasses.replace(new, rotary="gptj")


def test_operations_are_recorded(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAWATTN_LOG gets those over caches too, each once, as a bundle reads them; also with a function as a mask."""
    log = tmp_path / "operations.jsonl"
    monkeypatch.setattr(record, "_logged", set())
    monkeypatch.setenv("RAWATTN_LOG", str(log))
    pages, lens = np.zeros((2, 4, 8, 2, 16), np.float32), np.array([3, 8], np.int32)
    q, k = np.ones((2, 1, 4, 16), np.float32), np.ones((2, 1, 2, 16), np.float32)
    for _ in range(2):
        step = Step(lens, np.array([[3], [1]], np.int32))
        o = rawattn.attention_append(q, k, k, KVCache(*pages), step)
        rawattn.merge_states([(o, np.zeros((2, 4, 1), np.float32))] * 2)
        rawattn.attention_kvcache(q, KVCache(*pages), step, mask=lambda b, h, q, kv: kv > q - 3)
    found = record.operations_of(log)
    assert [type(op).__name__ for op in found] == ["Append", "AttentionKVCache", "Combine", "AttentionKVCache"]
    assert [json.loads(line) for line in log.read_text().splitlines()] == [op.to_json() for op in found]
