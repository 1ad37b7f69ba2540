"""Records of latent caches, 656 bytes a row: written to the byte as FlashMLA defines them, and read with any scales."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import rawattn
from rawattn import FP8_DS_MLA, KVCache, ProblemError, Rotary, Step, UnsupportedError, reference
from rawattn.array import reading
from rawattn.driver.device import TYPICAL
from rawattn.operation import Append, AttentionKVCache
from rawattn.operation.keys import KeyLists, ListSizes
from rawattn.operation.kvcache import EVEN
from rawattn.operation.operand import Layout
from rawattn.reference.records import dequantize, quantize
from rawattn.runtime.select import select
from rawattn.testing import _move, expect
from rawattn.variant.element import BF16, E4M3, FP16, FP32
from tests.caches import Cached

torch = pytest.importorskip("torch")
Array = npt.NDArray[Any]
CASE = Cached(((3, 9), (0, 5), (4, 0), (1, 1), (2, 30)), pool="shared", heads=4, head_dim=576, head_dim_v=512, dtype="bf16")


def rows_of_all_sizes(count: int, seed: int = 0) -> Array:
    """Latent rows whose groups of 128 columns are of any size: zeros, the smallest, and powers of two times 448 among them."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, 576)) * np.exp2(rng.integers(-40, 40, (count, 1)))
    for i, largest in enumerate((0.0, 448.0, 450.0, 1e-30, 0.0448, 0.056, 7 * 2.0**-9, 3e38, 2.0**-7 * 448)):
        group = rows[i, 128 * (i % 4) : 128 * (i % 4 + 1)]
        group[:] = np.clip(group, -largest, largest)
        group[5] = -largest
    return rows.astype(np.float32).astype(BF16.dtype)


def quantized_by_torch(rows: Any) -> Any:
    """Makes of rows in bf16, (n, 576), the bytes that FlashMLA's tests say."""
    groups = rows[:, :512].unflatten(1, (4, 128))
    scale = torch.pow(2, (groups.abs().amax(-1).float() / 448.0).clamp_min(1e-4).log2().ceil()).float()
    eight = (groups.float() / scale[..., None]).to(torch.float8_e4m3fn).flatten(1)
    return torch.cat([x.contiguous().view(torch.uint8) for x in (eight, scale, rows[:, 512:])], 1)


def test_bytes_are_those_of_flash_mla() -> None:
    rows = rows_of_all_sizes(64)
    wanted = quantized_by_torch(_move(rows, "torch", "cpu")).numpy()
    np.testing.assert_array_equal(quantize(FP8_DS_MLA, rows), wanted)
    kept = torch.from_numpy(wanted.copy())
    scales = kept[:, 512:528].view(torch.float32).repeat_interleave(128, 1)
    read = dequantize(FP8_DS_MLA, wanted)
    np.testing.assert_array_equal(read[:, :512], (kept[:, :512].view(torch.float8_e4m3fn).double() * scales).numpy())
    np.testing.assert_array_equal(read[:, 512:], rows[:, 512:].astype(np.float64))
    np.testing.assert_array_equal(dequantize(FP8_DS_MLA, quantize(FP8_DS_MLA, read)), read)  # by smaller scales where these do
    strange = rows[:3].copy()
    strange[0, 3], strange[1, 130], strange[2, 570] = np.nan, np.inf, -np.inf
    found = dequantize(FP8_DS_MLA, quantize(FP8_DS_MLA, strange))
    assert np.isnan(found[0, :128]).all() and np.isfinite(found[0, 128:]).all() and np.isnan(found[1, 130])
    assert np.isfinite(found[1, :128]).all() and found[2, 570] == -np.inf


def pages_of(case: Cached, padded: int = 0) -> Array:
    """Pages of records, (pages, page_size, 656), that lie as a table needs; ``padded`` rows lie behind each page."""
    pages = sum(case.counts()) + 3
    return np.full((pages, case.page_size + padded, 656), 255, np.uint8)[:, : case.page_size]


def filled(case: Cached, padded: int = 0, free_scales: bool = False) -> tuple[Array, list[Array]]:
    """Pages with records of every sequence's keys that count, and what they say, (kv_len, 576) of each sequence."""
    pages, keys = pages_of(case, padded), []
    for i in range(len(case.lengths)):
        stored = quantize(FP8_DS_MLA, case.stored(i)[0][:, 0])
        if free_scales:
            scales = case.rng().uniform(0.01, 0.1, (len(stored), 4)).astype(np.float32)
            stored[:, 512:528] = scales.view(np.uint8)
        for j in case.kept(i):
            pages[case.pages()[i][j // case.page_size], j % case.page_size] = stored[j]
        keys.append(dequantize(FP8_DS_MLA, stored))
    return pages, keys


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_attention(library: str) -> None:
    """The definition of attention over what the records say, with any scales, from pages with rows between them."""
    for change in ({}, {"dtype": "fp16", "page_size": 64}, {"dtype": "fp32", "page_size": 1, "form": "indptr", "window": (4, 0)}):
        case = dataclasses.replace(CASE, lengths=((3, 9), (2, 5), (1, 0), (1, 40)), **change)
        pages, keys = filled(case, padded=1, free_scales=True)
        cache, step = KVCache.records(_move(pages, library, "cpu")), case.step(library, nonsense_before=True)
        q, options = _move(case.rows(4, 576, 1), library, "cpu"), {"window": case.window, "scale": 0.05, "return_lse": True}
        found = rawattn.attention_kvcache(q, cache, step, **options)
        pair = rawattn.attention_kvcache((q[..., :512], q[..., 512:]), cache, step, **options)
        assert all(bool((a == b).all()) for a, b in zip(found, pair, strict=True))
        o, lse = (np.asarray(x.double() if library == "torch" else x, np.float64) for x in found)
        exact = reference.attention_kvcache(q, cache, step, **options)
        for i, x in enumerate(keys):
            k = x[None, :, None]
            wanted = expect(case.of(case.rows(4, 576, 1), i)[None], k, k[..., :512], mask=case.mask(i), scale=0.05)
            wanted.check(case.of(o, i)[None], case.of(lse.T, i).T[None])
            np.testing.assert_allclose(case.of(exact[0], i)[None], wanted.o, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("way", ["step", "slots", "operator"])
def test_append(library: str, way: str) -> None:
    """The bytes of the specification, with the last columns rotated; other rows stay as they are."""
    if way == "operator" and library == "numpy":
        pytest.skip("an operator of torch")
    case = CASE
    k, q = (_move(case.rows(heads, 576, heads), library, "cpu") for heads in (1, 4))
    cos, sin = (_move(np.asarray(case.normal(40, 32, seed=seed), np.float32), library, "cpu") for seed in (5, 6))
    slots = _move(np.array([5, -1, 0, 9, 2, 44, 3, -7, 1, 11]), library, "cpu") if way == "slots" else None
    pages = pages_of(case, padded=1)
    cache, step = KVCache.records(_move(pages, library, "cpu")), case.step(library)
    call = torch.compile(rawattn.append, backend="aot_eager", fullgraph=True) if way == "operator" else rawattn.append
    for rotary in (None, Rotary(cos, sin, True, first_column=512)):
        given = {"slots": slots, "rotary": rotary, "q": q if rotary else None}
        wanted, *turned = reference.append(cache, step, k, None, **given)
        found = call(cache, step, k, None, **given)
        nope = np.asarray(cache.k)[..., :528]
        np.testing.assert_array_equal(nope, wanted[..., :528])
        a, b = (x[..., 528:].copy().view(BF16.dtype).astype(np.float32) for x in (np.asarray(cache.k), wanted))
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-5)
        assert found is None if rotary is None else found.shape == turned[0].shape
    assert (np.asarray(cache.k) != 255).any() and (np.asarray(cache.k) == 255).all(-1).sum() == np.asarray(cache.k).shape[
        0
    ] * 4 - {"slots": 8}.get(way, 6)


def test_append_then_read() -> None:
    """Attention over what append wrote is that over the rows, by the format's precision."""
    case = Cached(((9, 9), (5, 5)), pool="shared", heads=4, head_dim=576, head_dim_v=512, dtype="fp32")
    k, q, step = case.rows(1, 576, 1), case.rows(4, 576, 2), case.step()
    cache, latent = KVCache.records(pages_of(case)), case.made(*case.pools())
    found = rawattn.attention_append(q, k, None, cache, step, scale=0.05)
    wanted = rawattn.attention_append(q, k, None, latent, step, scale=0.05)
    assert 1e-4 < np.abs(found - wanted).max() < 0.15


def test_copies_and_words() -> None:
    cache = KVCache.records(np.zeros((3, 64, 656), np.uint8), FP8_DS_MLA)
    for made in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        again = made(cache)
        assert again.format is not None and (again.pages, again.page_size, again.kv_heads) == (3, 64, 1)
        assert (again.head_dim, again.head_dim_v, again.v_in_k, again.is_latent) == (576, 512, True, True)
    assert str(cache) == "KVCache fp8_ds_mla, 3 pages of 64, kv_heads 1, head_dim 576/512, NHD"
    assert rawattn.kvcache_bytes([65, 1], 1, 576, FP8_DS_MLA, layers=2, page_size=64) == 2 * 192 * 656
    with pytest.raises(ProblemError, match="kv_heads is 2 and head_dim 576; records have 1 and 576"):
        rawattn.kvcache_bytes([65], 2, 576, FP8_DS_MLA)


def operations() -> tuple[AttentionKVCache, Append]:
    pages = filled(CASE)[0]
    cache, step = KVCache.records(pages), CASE.step()
    arrays = cache.arrays_of(step.batch) | step.arrays
    rows = {name: reading.read(CASE.rows(heads, 576, 1), name) for name, heads in (("q", 4), ("k", 1))}
    return AttentionKVCache.of({"q": rows["q"], **arrays}, rawattn.Spec()), Append.of({"k": rows["k"], **arrays})


def test_operations() -> None:
    for op in operations():
        assert op.kv_element is FP8_DS_MLA and (op.head_dim, op.head_dim_v, op.kv_heads) == (576, 512, 1)
        assert [(x.element, x.shape[3]) for x in op.inputs if x.name.endswith("_cache")] == [("uint8", 656)]
        assert type(op).from_json(op.to_json()) == op and "bf16 over fp8_ds_mla" in str(op)
        assert op.kind != dataclasses.replace(op, kv_element=BF16).kind
    attention, append = operations()
    assert attention.bytes - dataclasses.replace(attention, kv_len=0).bytes == 5 * attention.kv_len * 656
    assert append.bytes - dataclasses.replace(append, kv_element=E4M3).bytes == 10 * (656 - 576)
    assert select(append, TYPICAL["sm_90a"]).kernel.name == "append"


def test_who_computes_it() -> None:
    """All that adapters pass on: records and 16 bits, q in one array or two, steps and lists, on each GPU from Ampere on."""
    step, device = operations()[0], TYPICAL["sm_90a"]
    plain = {"kv_element": BF16, "latent": True}
    physical = {"spec": rawattn.Spec(keys=KeyLists(True, 1, 1, True)), "keys": ListSizes(2048, 0, 0, True), "form": "rows"}
    for arch, gpu in TYPICAL.items():
        for q, kv, form in itertools.product(({}, {"q_rope": True}, {"element": FP16}), ({}, plain), ({}, physical)):
            op = dataclasses.replace(step, **{**kv, **form, **q, **({"kv_element": FP16} if kv and "element" in q else {})})
            if gpu.capability >= 80:
                assert select(op, gpu).kernel.name in ("attn_fwd_mma", *["attn_mla"] * bool(kv)), (arch, str(op))
    for change, message in (
        ({"element": FP32}, "attn_fwd_mma: .*it takes bf16 and fp16, not fp32"),
        ({"split_keys": EVEN}, "attn_fwd_mma: split is 'even'"),
        ({"layout": Layout("rows", "k_cache lies apart")}, "attn_fwd_mma: k_cache lies apart"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            select(dataclasses.replace(step, **change), device)
    with pytest.raises(UnsupportedError, match="it takes caches in the format of q, bf16, e4m3 and e5m2, not fp8_ds_mla"):
        select(step, device, "attn_decode")


PAGES = np.zeros((3, 4, 656), np.uint8)
WRONG: tuple[tuple[Any, str], ...] = (
    (
        lambda: KVCache.records(PAGES.view(np.int8)),
        r"pages is int8 of shape \(3, 4, 656\); it must be uint8 of shape \(pages, page_size, 656\)",
    ),
    (lambda: KVCache.records(PAGES[..., :584]), r"pages is uint8 of shape \(3, 4, 584\); it must be uint8 of shape"),
    (lambda: KVCache.records(PAGES[:, :, None]), r"pages is uint8 of shape \(3, 4, 1, 656\); it must be"),
    (lambda: KVCache.records(PAGES[:, :0]), "with a row in each page"),
    (lambda: KVCache.records(np.zeros((3, 4, 1312), np.uint8)[..., ::2]), "pages has a stride of 2 in its last dimension"),
    (lambda: KVCache.records(np.zeros((3, 4, 658), np.uint8)[..., :656]), "rows must begin at multiples of 4"),
    (lambda: KVCache.records(PAGES, "fp8_ds_mla"), "format is 'fp8_ds_mla'; it must be rawattn.FP8_DS_MLA"),
    (lambda: KVCache(PAGES, PAGES, format=FP8_DS_MLA), "v was given beside format=rawattn.FP8_DS_MLA; leave it out"),
    (lambda: KVCache(PAGES, None, k_scale=2.0, format=FP8_DS_MLA), "k_scale was given beside format="),
    (lambda: KVCache(PAGES, None, "HND", format=FP8_DS_MLA), "layout was given beside format="),
    (
        lambda: rawattn.attention_kvcache(CASE.rows(4, 512, 1), KVCache.records(filled(CASE)[0]), CASE.step()),
        "q has head_dim 512 but the cache has 576",
    ),
    (
        lambda: rawattn.append(KVCache.records(PAGES), None, CASE.rows(1, 512, 1), None, slots=np.zeros(10, np.int64)),
        r"k has shape \(10, 1, 512\); it must be \(10, 1, 576\)",
    ),
    (
        lambda: rawattn.append(
            KVCache.records(PAGES), None, CASE.rows(1, 576, 1), CASE.rows(1, 512, 1), slots=np.zeros(10, np.int64)
        ),
        "v was given, but the cache's v is a view of its k",
    ),
)


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        call()


def test_lists_of_rows() -> None:
    """Physical lists over records, of pages of any size with rows between them, as FlashMLA has them."""
    case = dataclasses.replace(CASE, page_size=61)
    rng, pages = np.random.default_rng(0), np.full((5, 62, 656), 255, np.uint8)[:, :61]
    pages[:] = quantize(FP8_DS_MLA, rng.standard_normal((5, 61, 576)))
    q, rows = case.rows(4, 576, 1)[:6].reshape(2, 3, 4, 576), rng.integers(0, 5 * 61, (6, 20)).astype(np.int32)
    rows[0, 3:], rows[1], rows[2, ::2] = -1, -1, -1
    step = Step(None, None, causal=False, keys=rawattn.TopK(rows, physical=True))
    o, lse = rawattn.attention_kvcache(q, KVCache.records(pages), step, scale=0.05, return_lse=True)
    for i in range(6):
        k = dequantize(
            FP8_DS_MLA, pages.reshape(-1, 656) if pages.flags.c_contiguous else np.ascontiguousarray(pages).reshape(-1, 656)
        )
        k = k[rows[i][rows[i] >= 0]][None, :, None]
        wanted = expect(q.reshape(6, 1, 4, 576)[i][None], k, k[..., :512], scale=0.05)
        wanted.check(o.reshape(6, 1, 4, 512)[i][None], lse[i // 3, :, i % 3, None][None])
