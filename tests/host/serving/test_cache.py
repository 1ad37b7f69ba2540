"""Caches, their copies and bytes; every wrong array of a KVCache, a Step and a Rotary."""

from __future__ import annotations

import copy
import itertools
import pathlib
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import KVCache, ProblemError, Rotary, Step, UnsupportedError
from rawattn.array.reading import read
from rawattn.variant.element import E4M3, E5M2, KV_ELEMENTS
from tests.caches import Cached

INT = np.int32
COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("form", ["table", "indptr"])
def test_copies(library: str, form: str, way: str) -> None:
    """A copy knows what is true of its own arrays; its v is a view of its own k, where that was so."""
    if library == "torch":
        pytest.importorskip("torch")
    from rawattn.testing import _move

    for pool in ("shared", "apart"):
        case = Cached(((3, 20), (1, 7)), kv_heads=2, pool=pool, layout="HND", form=form, dtype="bf16")
        q, k, v = (_move(case.rows(2, 16, seed), library, "cpu") for seed in (1, 2, 3))
        angles = _move(np.ones((30, 4), np.float32), library, "cpu")
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


# ---- wrong arguments


def pool(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape or (6, 4, 2, 8), dtype)


def scales(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


EIGHT = pool(dtype=E4M3.dtype), pool(dtype=E4M3.dtype)


def lens(*numbers: int) -> Any:
    return np.array(numbers, INT)


LENS, TABLE = lens(3, 5), np.array([[0, 1, 9], [2, 3, 9]], INT)
SCALED = KVCache(*EIGHT, v_scale=scales(1, 2))
OTHERS = KVCache(*EIGHT, v_scale=scales(3, 2))
CACHE, STEP, Q = KVCache(pool(), pool()), Step(LENS, TABLE), np.zeros((2, 1, 4, 8), np.float32)
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
