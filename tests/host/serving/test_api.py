"""Attention over caches and append, on the CPU, against their definition; every wrong argument."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pathlib
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import KVCache, ProblemError, Rotary, Step, UnsupportedError, reference
from rawattn.array.arrays import read
from rawattn.operation import Append, AttentionKVCache
from rawattn.runtime import record
from rawattn.testing import expect
from rawattn.variant.element import E4M3, E5M2, ELEMENTS, FP8, KV_ELEMENTS
from tests.caches import Cached, caches

INT = np.int32


def check(case: Cached, library: str = "numpy") -> None:
    """Compares o and lse of each sequence with attention of its keys, gathered."""
    from rawattn.testing import _moved

    q = case.rows(case.heads, case.head_dim, 1)
    cache, step = case.cache(library), case.step(library, nonsense_before=True)
    sinks = case.sink_logits()
    options: dict[str, Any] = {"window": case.window, "softcap": case.softcap}
    given_sinks = None if sinks is None else _moved(sinks, library, "cpu")
    found = rawattn.attention_kvcache(_moved(q, library, "cpu"), cache, step, sinks=given_sinks, return_lse=True, **options)
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


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("form", ["table", "indptr"])
def test_copies(library: str, form: str, way: str) -> None:
    """A copy knows what is true of its own arrays; its v is a view of its own k, where that was so."""
    if library == "torch":
        pytest.importorskip("torch")
    from rawattn.testing import _moved

    for pool in ("shared", "apart"):
        case = Cached(((3, 20), (1, 7)), kv_heads=2, pool=pool, layout="HND", form=form, dtype="bf16")
        q, k, v = (_moved(case.rows(2, 16, seed), library, "cpu") for seed in (1, 2, 3))
        angles = _moved(np.ones((30, 4), np.float32), library, "cpu")
        given = case.cache(library), case.step(library), Rotary(angles, angles, interleaved=True)
        cache, step, rotary = COPIES[way](given)
        assert cache.v_in_k == given[0].v_in_k == (pool == "shared")
        wanted, found = (
            rawattn.attention_append(q, k, None if each[0].v_in_k else v, *each[:2], rotary=each[2])
            for each in (given, (cache, step, rotary))
        )
        assert bool((wanted == found).all()) and (cache.k is given[0].k) == (way == "copy")


class Layer(KVCache):
    """A user's own cache, which knows more than ours."""


def test_copies_of_a_class_of_their_own(tmp_path: pathlib.Path) -> None:
    """A copy is of the same class and has its attributes, which a shallow copy shares."""
    for pool, (way, made) in itertools.product(("shared", "apart"), COPIES.items()):
        case = Cached(((3, 20), (1, 7)), pool=pool)
        given = Layer(*case.pools())
        vars(given).update(number=3, names=["a"])
        found = made(given)
        assert type(found) is Layer and (found.number, found.names) == (3, ["a"]) and found.v_in_k == given.v_in_k
        assert (found.names is given.names) == (way == "copy")


@pytest.mark.parametrize("dtype", [*KV_ELEMENTS, np.float16, np.dtype("float32"), ml_dtypes.bfloat16, "float8_e4m3fn"])
@pytest.mark.parametrize("pool", ["apart", "interleaved", "shared"])
def test_bytes_of_caches(pool: str, dtype: Any) -> None:
    """Those of the arrays that a user makes of so many pages, for each layer."""
    name = dtype if dtype in KV_ELEMENTS else read(np.empty(0, np.dtype(dtype)), "x").dtype
    lengths = (0, 1, 4, 5, 17)
    own = KV_ELEMENTS[name].dtype
    pages, sizes = 0 + 1 + 1 + 2 + 5, (4, 3, 24)
    k, v = np.empty((pages, *sizes), own), np.empty((pages, *sizes[:-1], 16), own)
    cache = KVCache(k, k[..., :16]) if pool == "shared" else KVCache(k, v)
    made = k.nbytes + v.nbytes * (pool != "shared")
    asked = {"kv_heads": cache.kv_heads, "head_dim": 24, "dtype": dtype, "head_dim_v": 16, "v_in_k": cache.v_in_k}
    assert rawattn.kvcache_bytes(lengths, **asked, layers=7, page_size=4) == 7 * made
    assert rawattn.kvcache_bytes(4, **asked, page_size=4) * pages == made, "a page"
    assert rawattn.kvcache_bytes(np.array(lengths), **asked) * 36 == made * 27, "keys alone"


def test_bytes_by_torchs_names() -> None:
    torch = pytest.importorskip("torch")
    for dtype, size in ((torch.bfloat16, 2), (torch.float8_e5m2, 1), (torch.float64, 8)):
        assert rawattn.kvcache_bytes(10, 8, 128, dtype, layers=32) == 10 * 8 * 2 * 128 * 32 * size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be bf16, fp16"), ({"dtype": None}, "dtype is None"),
        ({"lengths": [3, -1]}, "lengths has -1; each must be an int from 0"), ({"lengths": 2.5}, "lengths has 2.5"),
        ({"page_size": 0}, "page_size has 0; each must be an int from 1"), ({"layers": True}, "layers has True"),
    ],
)  # fmt: skip
def test_bytes_of_no_cache(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as error:
        rawattn.kvcache_bytes(**{"lengths": 5, "kv_heads": 2, "head_dim": 8, **changes})
    assert message in str(error.value)


# ---- append


@st.composite
def appends(draw: Any) -> tuple[Cached, dict[str, Any]]:
    case = draw(caches(new=True))
    half, angles = draw(st.integers(1, case.head_dim // 2)), (case.dtype, ELEMENTS[case.dtype].lse_name)
    return case, {
        "rotary": draw(st.booleans()), "half": half, "interleaved": draw(st.booleans()), "positions": draw(st.booleans()),
        "slots": draw(st.booleans()), "q": draw(st.booleans()), "angles": draw(st.sampled_from(angles)),
    }  # fmt: skip


def rotary_of(case: Cached, asked: dict[str, Any], rows: tuple[int, ...]) -> Rotary | None:
    if not asked["rotary"]:
        return None
    cos, sin = (case.normal(60, asked["half"], seed=seed).astype(ELEMENTS[asked["angles"]].dtype) for seed in (5, 6))
    positions = case.rng().integers(0, 60, rows) if asked["positions"] else None
    return Rotary(cos, sin, asked["interleaved"], positions)


@settings(max_examples=120, deadline=None)
@given(appends())
def test_append(drawn: tuple[Cached, dict[str, Any]]) -> None:
    case, asked = drawn
    k, v, q = (case.rows(n, dim, seed) for n, dim, seed in (
        (case.kv_heads, case.head_dim, 1), (case.kv_heads, case.head_dim_v, 2), (case.heads, case.head_dim, 3)))  # fmt: skip
    cache, step = case.made(*case.pools()), case.step()
    rotary, q = rotary_of(case, asked, k.shape[:-2]), q if asked["q"] and asked["rotary"] else None
    slots = None
    if asked["slots"]:
        slots, order = np.full(k.shape[:-2], -1), case.rng().permutation(cache.pages * cache.page_size)
        slots.flat[: len(order)] = order[: slots.size]
        slots[case.rng().random(slots.shape) < 0.2] = -5
    v_given = None if cache.v_in_k else v
    wanted = reference.append(cache, step, k, v_given, slots=slots, rotary=rotary, q=q)
    q_out = None if q is None else np.full_like(q, np.nan)
    assert rawattn.append(cache, step, k, v_given, slots=slots, rotary=rotary, q=q, q_out=q_out) is q_out
    eps = 0 if rotary is None else {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 1e-6, "fp64": 1e-15}[case.dtype]
    for found, exact in zip((cache.k, cache.v, q_out), wanted, strict=False):
        step_of = STEPS.get(case.kv_dtype, (eps, 8 * eps)) if eps and found is not q_out else (eps, 8 * eps)
        np.testing.assert_allclose(found.astype(np.float64), exact, rtol=step_of[0], atol=step_of[1])


STEPS = {"e4m3": (2.0**-3, 2.0**-9), "e5m2": (2.0**-2, 2.0**-16)}  # from a number to the next: relative, and of subnormal ones


def test_append_in_place_and_without_lengths() -> None:
    case = Cached(((4, 9), (2, 2)), head_dim=8)
    k, q = case.rows(1, 8, 1), case.rows(2, 8, 2)
    cos = np.random.default_rng(0).standard_normal((20, 4), np.float32)
    rotary = Rotary(cos, cos[::-1], positions=np.array([3, 4, 5, 0, 19, 7]))
    slots = np.array([0, 5, -1, 9, -8, 3])
    cache = case.made(*case.pools())
    v = case.rows(1, 16, 3)
    wanted = reference.append(cache, None, k, v, slots=slots, rotary=rotary, q=q)
    assert rawattn.append(cache, None, k, v, slots=slots, rotary=rotary, q=q, q_out=q) is q
    np.testing.assert_allclose(q, wanted[2], atol=1e-6)
    np.testing.assert_allclose(cache.k, wanted[0], atol=1e-6)
    assert rawattn.append(cache, None, k, v, slots=slots) is None
    np.testing.assert_array_equal(cache.k.reshape(-1, 1, 8)[[0, 5, 9, 3]], k[[0, 1, 3, 5]])


@pytest.mark.parametrize("element", FP8.values(), ids=FP8)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_append_rounds_to_nearest_even(element: Any, dtype: str) -> None:
    """All numbers of eight bits, what lies halfway between two of them and beside that, infinity and NaN."""
    every = np.arange(256, dtype=np.uint8).view(element.dtype).astype(np.float64)
    finite = np.unique(every[np.isfinite(every)])
    half = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate([finite, half, half * (1 + 2.0**-7), half * (1 - 2.0**-8), [449, -500, 6e4, -65504, np.inf, -np.inf]])
    given = np.resize(np.append(x, np.nan), (1, 400 * 8)).astype(ELEMENTS[dtype].dtype).reshape(1, 400, 1, 8)
    k, v = (np.full((1, 400, 1, 8), 3, element.dtype) for _ in range(2))
    rawattn.append(KVCache(k, v, v_scale=4), Step(np.array([400], INT)), given, given)
    codes = finite[np.abs(np.arange(len(finite)) % 2 - (len(finite) // 2 % 2)) == 0]  # of even fraction: 0 is among them
    for found, factor in ((k, 1), (v, 4)):
        exact = given.astype(np.float64) / factor
        nearest = finite[np.clip(np.searchsorted(half, np.nan_to_num(exact)), 0, len(finite) - 1)]
        ties = np.isin(exact, half)
        assert ties.sum() > 100 and np.isin(found[ties].astype(np.float64), codes).all()
        assert np.array_equal(
            np.where(ties | np.isnan(exact), 0, found.astype(np.float64)), np.where(ties | np.isnan(exact), 0, nearest)
        )
        assert np.array_equal(np.isnan(found.astype(np.float64)), np.isnan(exact))


def test_rows_without_a_position() -> None:
    """Lengths say positions: sequences without keys are left out, whatever their slots. Those without a place may have a
    negative position."""
    case, cos = Cached(((2, 0), (1, 3))), np.ones((9, 4), np.float32)
    k = case.rows(1, 16, 1)
    for positions, slots, written in ((None, [0, 1, 2], [2]), (np.array([0, -1, 3]), [0, -1, 2], [0, 2])):
        cache = case.made(*case.pools())
        q_out = rawattn.append(
            cache, case.step(), k, k, slots=np.array(slots), rotary=Rotary(cos, cos, positions=positions), q=k, q_out=k.copy()
        )
        rows = cache.v.reshape(-1, 16)
        assert np.array_equal(rows[written], k[written, 0]) and np.isnan(np.delete(rows, written, 0)).all()
        assert [bool((q_out[i] != k[i]).any()) for i in range(3)] == [i in written for i in range(3)]


def test_attention_append() -> None:
    """Token by token is as all at once."""
    case = Cached(((9, 9), (5, 5)), page_size=2, heads=4, kv_heads=2)
    q, k, v = case.rows(4, 16, 1), case.rows(2, 16, 2), case.rows(2, 16, 3)
    cos, sin = (f(np.outer(np.arange(9), 0.1 ** np.arange(4))).astype(np.float32) for f in (np.cos, np.sin))
    rotary, whole = Rotary(cos, sin), case.made(*case.pools())
    wanted = rawattn.attention_append(q, k, v, whole, case.step(), rotary=rotary, return_lse=True)
    cache, table = case.made(*case.pools()), case.step_arrays()["page_table"]
    for j in range(9):
        rows = [j, 9 + j] if j < 5 else [j, 0]
        step = Step(np.array([j + 1, j + 1 if j < 5 else 0], INT), table)
        o, lse = rawattn.attention_append(*(x[rows][:, None] for x in (q, k, v)), cache, step, rotary=rotary, return_lse=True)
        np.testing.assert_allclose(o[0, 0], wanted[0][j], atol=1e-6)
        np.testing.assert_allclose(lse[0, :, 0], wanted[1][:, j], atol=1e-6)
        if j < 5:
            np.testing.assert_allclose(o[1, 0], wanted[0][9 + j], atol=1e-6)
        else:
            assert (o[1] == 0).all() and (lse[1] == -np.inf).all()
    np.testing.assert_array_equal(cache.k, whole.k)


# ---- wrong arguments


def pool(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape or (6, 4, 2, 8), dtype)


def scales(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


EIGHT = pool(dtype=E4M3.dtype), pool(dtype=E4M3.dtype)


def lens(*numbers: int) -> Any:
    return np.array(numbers, INT)


LENS, TABLE = lens(3, 5), np.array([[0, 1, 9], [2, 3, 9]], INT)
ARRAYS: list[tuple[str, Any, str]] = [
    ("layout", lambda: KVCache(pool(), pool(), "DHN"), "layout is 'DHN'; it must be 'NHD' or 'HND'."),
    ("rank", lambda: KVCache(pool(4, 2, 8), pool()), r"k has 3 dimensions, (4, 2, 8); it must have 4, (pages, page_size, kv_hea"),
    ("rank HND", lambda: KVCache(pool(), pool(4), "HND"), "v has 1 dimensions, (4,); it must have 4, (pages, kv_heads, page_siz"),
    ("cache dtype", lambda: KVCache(pool(dtype=INT), pool()), "k has dtype int32; it must be bf16"),
    ("dtypes", lambda: KVCache(pool(), pool(dtype=np.float64)), "v has dtype fp64 but k has fp32; they must be the same."),
    ("shapes", lambda: KVCache(pool(), pool(6, 4, 3, 8)), "v has shape (6, 4, 3, 8) but k (6, 4, 2, 8); all but the last"),
    ("shapes HND", lambda: KVCache(pool(), pool(6, 4, 3, 8), "HND"), "v has shape (6, 4, 3, 8) but k (6, 4, 2, 8);"),
    ("empty pages", lambda: KVCache(pool(6, 0, 2, 8), pool(6, 0, 2, 8)), "k has page_size 0, (6, 0, 2, 8); it must be at least"),
    ("columns", lambda: KVCache(pool()[..., ::2], pool()), "k has a stride of 2 in its last dimension; it must be 1"),
    ("overlap", lambda: KVCache(x := pool(6, 4, 2, 16)[..., :8], x.base[..., 4:12]), "v overlaps k in memory, and is no view of"),
    ("scale", lambda: KVCache(pool(), pool(), k_scale=0.5), "k_scale is 0.5 but the cache holds fp32; scales are for e4m3 and e"),
    ("scales", lambda: KVCache(pool(), pool(), v_scale=scales(2)), "v_scale is an array but the cache holds fp32; scales are fo"),
    ("zero scale", lambda: KVCache(*EIGHT, k_scale=0), "k_scale is 0.0; it must be above 0, and finite."),
    ("nan as scale", lambda: KVCache(*EIGHT, k_scale=float("nan")), "k_scale is nan; it must be above 0, and finite."),
    ("small scale", lambda: KVCache(*EIGHT, v_scale=1e-60), "v_scale is 0.0; it must be above 0, and finite."),
    ("flag as scale", lambda: KVCache(*EIGHT, k_scale=True), "k_scale is True; it must be a float above 0, or a float32 array"),
    ("list of scales", lambda: KVCache(*EIGHT, k_scale=[1.0, 2.0]), "k_scale is [1.0, 2.0]; it must be a float above 0, or a fl"),
    ("scales' dtype", lambda: KVCache(*EIGHT, k_scale=scales(2, dtype=np.float64)), "k_scale has dtype fp64; it must be float32"),
    ("scales' heads", lambda: KVCache(*EIGHT, k_scale=scales(3)), "k_scale has shape (3,); it must broadcast to (batch, 2), kv_"),
    ("scales' rank", lambda: KVCache(*EIGHT, k_scale=scales(1, 2, 2)), "k_scale has shape (1, 2, 2); it must broadcast to (batc"),
    ("formats", lambda: KVCache(EIGHT[0], EIGHT[1].astype(E5M2.dtype)), "v has dtype e5m2 but k has e4m3; they must be the same"),
    ("no array", lambda: KVCache(None, pool()), "k is a NoneType; it must be an array"),
    ("no lengths", lambda: Step(), "kv_lens is None; it must be an int32 array of shape (batch,)."),
    ("int64", lambda: Step(np.array([1, 2])), "kv_lens has dtype int64; it must be int32: kv_lens.int() in torch"),
    ("table's rank", lambda: Step(LENS, LENS), "page_table has shape (2,); it must be (batch, max_pages)."),
    ("table's rows", lambda: Step(LENS, TABLE[:1]), "page_table has shape (1, 3) but kv_lens is for 2 sequences; it must be (ba"),
    ("starts", lambda: Step(LENS, TABLE, LENS), "cu_seqlens_q has shape (2,) but kv_lens is for 2 sequences; it must be (batch"),
    ("begin", lambda: Step(LENS, kv_begin=lens(1)), "kv_begin has shape (1,) but kv_lens is for 2 sequences; it must be (batch,"),
    ("causal", lambda: Step(LENS, causal=1), "causal is 1; it must be True, False, or an int32 array of shape (batch,)."),
    ("causal's dtype", lambda: Step(LENS, causal=np.array([True, False])), "causal has dtype bool; it must be int32"),
    ("bound", lambda: Step(LENS, max_q_len=-1), "max_q_len is -1; it must be an int >= 0, or None."),
    ("bound's type", lambda: Step(LENS, max_kv_len=2.0), "max_kv_len is 2.0; it must be an int >= 0, or None."),
    ("half of CSR", lambda: Step.from_indptr(lens(0, 1), lens(4), None), "indptr was given; pages end to end need indptr, indic"),
    ("both", lambda: Step(LENS, indptr=lens(0, 1, 2), indices=LENS, last_page_len=LENS), "kv_lens was given beside indptr;"),
    ("no indptr", lambda: Step.from_indptr(lens(), LENS, lens()), "indptr has shape (0,); it must be (batch + 1,)."),
    ("last pages", lambda: Step.from_indptr(lens(0, 1), LENS, LENS), "last_page_len has shape (2,) but indptr is for 1 sequence"),
    ("strided", lambda: Step(np.zeros(4, INT)[::2]), "kv_lens has a stride of 2 in its last dimension; it must be 1"),
    ("cos", lambda: Rotary(None, pool(9, 4)), "cos is None; it must be an array."),
    ("cos's rank", lambda: Rotary(pool(9), pool(9)), "cos has shape (9,); it must be (positions, rotary_dim / 2)."),
    ("sin", lambda: Rotary(pool(9, 4), pool(8, 4)), "sin is fp32 of shape (8, 4) but cos fp32 of (9, 4); they must be the same."),
    ("cos's dtype", lambda: Rotary(pool(9, 4, dtype=INT), pool(9, 4)), "cos has dtype int32; it must be float32 or the cache's."),
    ("positions", lambda: Rotary(pool(9, 4), pool(9, 4), positions=LENS), "positions has dtype int32; it must be int64."),
    ("style", lambda: Rotary(pool(9, 4), pool(9, 4), 1), "interleaved is 1; it must be True or False."),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [x[1:] for x in ARRAYS], ids=[x[0] for x in ARRAYS])
def test_wrong_arrays(make: Any, message: str) -> None:
    with pytest.raises((ProblemError, UnsupportedError)) as error:
        make()
    assert message in str(error.value)


SCALED = KVCache(*EIGHT, v_scale=scales(1, 2))
OTHERS = KVCache(*EIGHT, v_scale=scales(3, 2))
CACHE, STEP, Q = KVCache(pool(), pool()), Step(LENS, TABLE), np.zeros((2, 1, 4, 8), np.float32)
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
    ("split", {"split": 100}, "split is 100; it must be 'auto' or a power of two from 64."),
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


NEW, COS = np.ones((2, 1, 2, 8), np.float32), np.zeros((9, 4), np.float32)
SLOTS = np.array([[0], [1]])
READ_ONLY = pool()
READ_ONLY.flags.writeable = False
APPENDS: list[tuple[str, dict[str, Any], str]] = [
    ("no v", {"v": None}, "v is None; it must be an array, since the cache's v is no view of its k."),
    ("v of k", {"cache": KVCache(x := pool(), x[..., :4])}, "v was given, but the cache's v is a view of its k; give v=None."),
    ("k's heads", {"k": NEW[:, :, :1]}, "k has shape (2, 1, 1, 8); it must be (2, 1, 2, 8), by the cache and the rows of k."),
    ("v's rows", {"v": NEW[:1]}, "v has shape (1, 1, 2, 8); it must be (2, 1, 2, 8)"),
    ("k's dtype", {"k": NEW.astype(np.float64)}, "k has dtype fp64 but the cache has fp32; they must be the same."),
    ("k in eight bits", {"cache": KVCache(*EIGHT), "k": NEW.astype(E4M3.dtype)}, "k has dtype e4m3; it must be bf16, fp16, fp32"),
    ("two dtypes", {"cache": KVCache(*EIGHT), "v": NEW.astype(np.float64)}, "v has dtype fp64 but k has fp32; they must be the "),
    ("scales of others", {"cache": OTHERS}, "v_scale is for 3 sequences but the call has 2; its first dimension of two must be "),
    ("scales of slots", {"cache": OTHERS, "step": None, "slots": SLOTS[:, 0], "k": NEW[:, 0], "v": NEW[:, 0]}, "the call has 1;"),
    ("no step", {"step": None}, "step is None; it must be a rawattn.Step, or slots must say where each row goes."),
    ("no positions", {"step": None, "slots": SLOTS, "rotary": Rotary(COS, COS)}, "step is None and rotary has no positions; giv"),
    ("rotary", {"rotary": COS}, "rotary is a ndarray; it must be a rawattn.Rotary, or None."),
    ("angles", {"rotary": Rotary(pool(9, 5), pool(9, 5))}, "cos has 5 columns, for 10 of a head; k has head_dim 8."),
    ("angles' dtype", {"rotary": Rotary(COS.astype(np.float16), COS.astype(np.float16))}, "cos has dtype fp16; it must be fp32"),
    ("positions", {"rotary": Rotary(COS, COS, positions=SLOTS[0])}, "positions is int64 of shape (1,); it must be int64 of shap"),
    ("slots' dtype", {"slots": LENS}, "slots is int32 of shape (2,); it must be int64 of shape (2, 1), one for each row of k."),
    ("slot", {"slots": SLOTS + 23}, "slots has 24; it must be below 24, pages times page_size, or -1."),
    ("q alone", {"q": Q}, "q was given without rotary; append does nothing to q but rotate it."),
    ("q's rows", {"q": Q[:1], "rotary": Rotary(COS, COS)}, "q has shape (1, 1, 4, 8); it must be (2, 1, 4, 8), by the rows and"),
    ("q_out alone", {"q_out": Q}, "q_out was given without q; it receives the rotated q."),
    ("q_out", {"q": Q, "q_out": Q[:, :, :2], "rotary": Rotary(COS, COS)}, "q_out has shape (2, 1, 2, 8); it must be (2, 1, 4, 8"),
    ("position", {"step": Step(lens(3, 10), np.array([[0, 1, 2], [3, 4, 5]], INT)), "rotary": Rotary(COS, COS)}, "a row has pos"),
    ("negative", {"rotary": Rotary(COS, COS, positions=-SLOTS)}, "positions has -1 for a row that goes into the cache; i"),
    ("new rows", {"k": np.ones((2, 4, 2, 8), np.float32), "v": np.ones((2, 4, 2, 8), np.float32)}, "kv_lens[0] is 3 but 4 rows"),
    ("page", {"step": Step(lens(3, 9), TABLE)}, "page_table[1, 2] is 9; it must be a page of the cache, from 0 to 5."),
    ("long", {"step": Step(lens(3, 13), TABLE)}, "kv_lens[1] is 13; it must be from 0 to 12"),
    ("read-only", {"cache": KVCache(READ_ONLY, pool())}, "the cache's k is read-only; make the cache of a writable array."),
    ("expanded", {"cache": KVCache(np.broadcast_to(pool(6, 4, 1, 8), (6, 4, 2, 8)), pool())}, "the cache's k is read-only"),
    ("overlap", {"cache": KVCache(x := pool(), pool()), "k": x[:2, :1]}, "k overlaps the cache's k in memory; give an array of"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), [x[1:] for x in APPENDS], ids=[x[0] for x in APPENDS])
def test_wrong_appends(given: dict[str, Any], message: str) -> None:
    cache = KVCache(pool(), pool())
    with pytest.raises((ProblemError, UnsupportedError)) as error:
        rawattn.append(**{"cache": cache, "step": STEP, "k": NEW, "v": NEW, **given})
    assert message in str(error.value)
    assert not cache.k.any() and not cache.v.any()


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
    found = {"q": rawattn.array.arrays.read(Q, "q"), "k_cache": CACHE.arrays["k"], "v_cache": CACHE.arrays["v"], **STEP.arrays}
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
    given = {"k": rawattn.array.arrays.read(NEW, "k"), "v": rawattn.array.arrays.read(NEW, "v"), **found}
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
