"""Append, on the CPU, against its definition; every wrong argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import KVCache, ProblemError, Rotary, Step, UnsupportedError, reference
from rawattn.variant.element import E4M3, ELEMENTS, FP8
from tests.caches import Cached, caches
from tests.host.serving.test_cache import EIGHT, INT, LENS, OTHERS, STEP, TABLE, Q, lens, pool


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


STEPS = {"e4m3": (2.0**-3, 2.0**-9), "e5m2": (2.0**-2, 2.0**-16)}  # from a number to the next: relative, and of subnormal ones


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
