"""flash-attn's functions: their signatures, what each computes against the formula in float64, and what is refused."""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import rawattn  # noqa: E402
from rawattn.errors import ProblemError, UnsupportedError  # noqa: E402
from rawattn.integrations import flash_attn as fa2  # noqa: E402
from rawattn.integrations import flash_attn_interface as fa3  # noqa: E402

TAIL = "softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False"
VARLEN = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SCALES = "q_descale=None k_descale=None v_descale=None"
CHUNKS = "window_size=(-1, -1) attention_chunk=0 softcap=0.0"
HINTS = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
SIGNATURES = {  # as their documentation has them
    (fa2, "flash_attn_func"): f"q k v dropout_p=0.0 {TAIL} return_attn_probs=False",
    (fa2, "flash_attn_kvpacked_func"): f"q kv dropout_p=0.0 {TAIL} return_attn_probs=False",
    (fa2, "flash_attn_qkvpacked_func"): f"qkv dropout_p=0.0 {TAIL} return_attn_probs=False",
    (fa2, "flash_attn_varlen_func"): f"q k v {VARLEN} dropout_p=0.0 {TAIL} return_attn_probs=False block_table=None",
    (fa2, "flash_attn_varlen_kvpacked_func"): f"q kv {VARLEN} dropout_p=0.0 {TAIL} return_attn_probs=False",
    (fa2, "flash_attn_varlen_qkvpacked_func"): f"qkv cu_seqlens max_seqlen dropout_p=0.0 {TAIL} return_attn_probs=False",
    (fa2, "flash_attn_with_kvcache"): "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    (fa3, "flash_attn_func"): f"q k v softmax_scale=None causal=False qv=None {SCALES} {CHUNKS} {HINTS}",
    (fa3, "flash_attn_qkvpacked_func"): f"qkv softmax_scale=None causal=False {SCALES} {CHUNKS} deterministic=False "
    "num_heads_q=None sm_margin=0 return_attn_probs=False",
    (fa3, "flash_attn_varlen_func"): f"q k v {VARLEN} seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None "
    f"{SCALES} {CHUNKS} {HINTS}",
    (fa3, "flash_attn_with_kvcache"): "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
    f"max_seqlen_q=None rotary_seqlens=None {SCALES} softmax_scale=None causal=False {CHUNKS} rotary_interleaved=True "
    "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"causal": True}, {"window_size": (4, 0)}, {"causal": True, "window_size": (3, -1), "softcap": 2.0, "softmax_scale": 0.5},
]  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu("any"))])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def make(*shape: int, device: str = "cpu", dtype: Any = None, seed: int = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))


def formula(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """o and lse of dense sequences in float64, with flash-attn's meaning of its options."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (given.get("softmax_scale") or q.shape[-1] ** -0.5)
    if given.get("softcap"):
        s = given["softcap"] * torch.tanh(s / given["softcap"])
    left, right = given.get("window_size", (-1, -1))
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    right = 0 if given.get("causal") else right
    kept = ((at <= left) | torch.tensor(left < 0)) & ((-at <= right) | torch.tensor(right < 0))
    s = s.masked_fill(~kept, -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.where(torch.isinf(lse)[..., None], 0.0, torch.exp(s - lse[..., None]))
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def check(found: Any, wanted: Any) -> None:
    for x, y in zip(found, wanted, strict=True):
        near = 1e-5 if x.dtype == torch.float32 and x.device.type == "cpu" else 2e-2
        torch.testing.assert_close(x.double().cpu(), y.double(), rtol=near, atol=near)


@pytest.mark.parametrize(("module", "name"), SIGNATURES, ids=lambda x: getattr(x, "__name__", x).rpartition(".")[2])
def test_signature(module: Any, name: str) -> None:
    parameters = inspect.signature(getattr(module, name)).parameters.values()
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters)
    found = [x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in parameters]
    assert " ".join(found) == SIGNATURES[module, name]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_dense(module: Any, options: dict[str, Any], device: str) -> None:
    q, kv = make(2, 15, 4, 32, device=device), make(2, 20, 2, 2, 32, device=device, seed=1)
    wanted = formula(q, *kv.unbind(2), **options)
    o, lse, *rest = module.flash_attn_func(q, *kv.unbind(2), **options, return_attn_probs=True)
    check((o, lse), wanted)
    assert rest == ([None] if module is fa2 else [])
    assert torch.equal(module.flash_attn_func(q, *kv.unbind(2), **options), o)
    if module is fa2:
        assert torch.equal(fa2.flash_attn_kvpacked_func(q, kv, **options), o)
    qkv = make(2, 20, 3, 4, 32, device=device)
    check([module.flash_attn_qkvpacked_func(qkv, **options)], formula(*qkv.unbind(2), **options)[:1])


def test_grouped_qkvpacked() -> None:
    qkv = make(2, 20, 8, 32)
    o = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    check([o], formula(qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:], causal=True)[:1])
    with pytest.raises(ProblemError, match=r"heads \+ 2 kv_heads"):
        fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=3)
    for door in (fa2, fa3):
        with pytest.raises(ProblemError, match=r"qkv is a Tensor of shape \(2, 20, 8, 32\); it must be a tensor, \(batch"):
            door.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_varlen(module: Any, options: dict[str, Any], device: str) -> None:
    starts = torch.tensor([0, 7, 7, 20], dtype=torch.int32, device=device)
    q, kv = make(20, 4, 32, device=device), make(20, 2, 2, 32, device=device, seed=1)
    o, lse, *_ = module.flash_attn_varlen_func(q, *kv.unbind(1), starts, starts, 13, 13, **options, return_attn_probs=True)
    for part in (slice(0, 7), slice(7, 20)):
        rows = [x[None, part] for x in (q, *kv.unbind(1))]
        check((o[None, part], lse[None, :, part]), formula(*rows, **options))
    if module is fa2:
        assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 13, 13, **options), o)
        qkv = make(20, 3, 4, 32, device=device)
        found = fa2.flash_attn_varlen_qkvpacked_func(qkv, starts, 13, **options)
        assert torch.equal(found, fa2.flash_attn_varlen_func(*qkv.unbind(1), starts, starts, 13, 13, **options))


def test_varlen_of_used_rows() -> None:
    starts, used = torch.tensor([0, 7, 20], dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)
    lens = {"seqused_q": used, "seqused_k": used}
    q, k, v = (make(20, 2, 32, seed=i) for i in range(3))
    o = fa3.flash_attn_varlen_func(q, k, v, starts, starts, 13, 13, **lens, causal=True)
    given = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(
        (fa3.flash_attn_varlen_func(*given, starts, starts, 13, 13, **lens, causal=True) ** 2).sum(), given
    )
    for begin, n in ((0, 5), (7, 9)):
        part = [x[None, begin : begin + n] for x in given]
        wanted = formula(*part, causal=True)[0]
        check([o[None, begin : begin + n]], [wanted])
        gradients = torch.autograd.grad((wanted**2).sum(), part)
        check([x[None, begin : begin + n] for x in found], gradients)


@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_gradients(module: Any) -> None:
    qkv = make(2, 20, 3, 4, 32).requires_grad_()
    wanted = torch.autograd.grad((formula(*qkv.unbind(2), causal=True)[0] ** 2).sum(), qkv)
    check(torch.autograd.grad((module.flash_attn_qkvpacked_func(qkv, causal=True) ** 2).sum(), qkv), wanted)
    starts = torch.tensor([0, 20, 40], dtype=torch.int32)
    o = module.flash_attn_varlen_func(*qkv.flatten(0, 1).unbind(1), starts, starts, 20, 20, causal=True)
    check(torch.autograd.grad((o**2).sum(), qkv), wanted)


class Cache:
    """Three sequences in a cache, dense or in pages, and what is computed of them."""

    def __init__(self, device: str, pages: bool, new: int = 0) -> None:
        self.lens, self.new, self.device = [40, 0, 17], new, device
        self.kv = [make(64, 2, 2, 32, device=device, seed=i) for i in range(3)]  # of each sequence
        self.table = torch.tensor([[3, 0, 5, 9], [7, 1, 10, 11], [2, 4, 6, 8]], dtype=torch.int32, device=device)
        pool = torch.full((12, 16, 2, 2, 32) if pages else (3, 64, 2, 2, 32), torch.nan, device=device, dtype=self.kv[0].dtype)
        for i, (n, kv) in enumerate(zip(self.lens, self.kv, strict=True)):
            rows = pool[self.table[i].long()].flatten(0, 1) if pages else pool[i]
            rows[:n] = kv[:n]
            pool[self.table[i].long() if pages else i] = rows.view(4, 16, 2, 2, 32) if pages else rows
        self.k, self.v = (x.contiguous() for x in pool.unbind(2))
        self.added = torch.stack([kv[n : n + new] for n, kv in zip(self.lens, self.kv, strict=True)]) if new else None
        name = "block_table"
        self.places = {name: self.table} if pages else {}
        self.places["cache_seqlens"] = torch.tensor(self.lens, dtype=torch.int32, device=device)

    def wanted(self, q: Any, **options: Any) -> Any:
        found = [formula(q[i : i + 1], *self.kv[i][None, : n + self.new].unbind(2), **options) for i, n in enumerate(self.lens)]
        return [torch.cat(x) for x in zip(*found, strict=True)]

    def given(self, module: Any) -> dict[str, Any]:
        return {name.replace("block_table", "page_table") if module is fa3 else name: x for name, x in self.places.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("pages", [False, True], ids=["dense", "pages"])
@pytest.mark.parametrize("module", [fa2, fa3], ids=["2", "3"])
def test_cache(module: Any, pages: bool, options: dict[str, Any], device: str) -> None:
    q = make(3, 2, 4, 32, device=device, seed=9)
    cache = Cache(device, pages)
    found = module.flash_attn_with_kvcache(q, cache.k, cache.v, **cache.given(module), **options, return_softmax_lse=True)
    check(found, cache.wanted(q, **options))
    cache = Cache(device, pages, new=2)
    k, v = (x.contiguous() for x in cache.added.unbind(2))
    found = module.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **cache.given(module), **options)
    check([found], cache.wanted(q, **options)[:1])


def test_places_in_a_cache() -> None:
    """One length for all, none, sequences chosen by number, and left padding."""
    q, k, v = make(2, 1, 4, 32), make(5, 32, 2, 32, seed=1), make(5, 32, 2, 32, seed=2)
    rows = torch.tensor([3, 1], dtype=torch.int32)
    found = fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, cache_batch_idx=rows, causal=True)
    check([found], formula(q, k[[3, 1], :20], v[[3, 1], :20])[:1])
    check([fa2.flash_attn_with_kvcache(q, k[:2], v[:2])], formula(q, k[:2], v[:2])[:1])
    first = torch.tensor([4, 4], dtype=torch.int32)
    found = fa2.flash_attn_with_kvcache(q, k[:2], v[:2], cache_seqlens=20, cache_leftpad=first)
    check([found], formula(q, k[:2, 4:20], v[:2, 4:20])[:1])


def test_ragged_queries_and_pages() -> None:
    cache = Cache("cpu", pages=True)
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    q = make(5, 4, 32, seed=9)
    parts = {i: cache.kv[i][None, : cache.lens[i]].unbind(2) for i in (0, 2)}
    wanted = [formula(q[None, :3], *parts[0], causal=True)[0], formula(q[None, 3:], *parts[2], causal=True)[0]]
    lens = cache.places["cache_seqlens"]
    by_cache = fa3.flash_attn_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=lens, page_table=cache.table, cu_seqlens_q=starts, max_seqlen_q=3, causal=True
    )
    ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
    by_varlen = fa2.flash_attn_varlen_func(q, cache.k, cache.v, starts, ends, 3, 40, causal=True, block_table=cache.table)
    for found in (by_cache, by_varlen):
        check([found[None, :3], found[None, 3:]], wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved: bool) -> None:
    """The rotation is that of ``rawattn.append``, at positions that follow cache_seqlens."""
    q = make(3, 2, 4, 32, seed=9)
    angles = torch.arange(64.0)[:, None] / 50 ** torch.arange(0, 1, 1 / 16)
    cos, sin = angles.cos(), angles.sin()
    cache, other = Cache("cpu", True, new=2), Cache("cpu", True, new=2)
    k, v = (x.contiguous() for x in cache.added.unbind(2))
    rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    found = fa2.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **rotary, **cache.places, causal=True)
    step = rawattn.Step(other.places["cache_seqlens"] + 2, other.table)
    pools = rawattn.KVCache(other.k, other.v)
    wanted = rawattn.attention_append(q, k, v, pools, step, rotary=rawattn.Rotary(cos, sin, interleaved))
    assert torch.equal(found, wanted) and torch.equal(cache.k.nan_to_num(), other.k.nan_to_num())
    with pytest.raises(UnsupportedError, match="several queries that are not causal"):
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **rotary, **cache.places, window_size=[-1, -1])
    with pytest.raises(ProblemError, match="rotary_cos was given without k"):
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, **rotary, **cache.places)
    with pytest.raises(ProblemError, match="rotary_sin was given without rotary_cos"):
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, rotary_sin=sin, **cache.places)
    starts = torch.tensor([0, 1, 2, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="several queries that are not causal"):
        packed, places = (x.flatten(0, 1) for x in (q, k, v)), {"cache_seqlens": cache.places["cache_seqlens"]}
        packed_q, *packed_new = packed
        fa3.flash_attn_with_kvcache(
            packed_q, cache.k, cache.v, *packed_new, **rotary, **places, page_table=cache.table, cu_seqlens_q=starts
        )
    with pytest.raises(UnsupportedError, match="rotary_cos was given beside cache_leftpad"):
        first = torch.zeros(3, dtype=torch.int32)
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, **rotary, **cache.places, cache_leftpad=first, causal=True)


def test_a_step_with_new_keys_is_traced() -> None:
    """As two operators, whose graph writes other caches, too."""
    pools, (q, k, v), lens = make(2, 2, 16, 2, 8), make(3, 2, 1, 2, 8), torch.tensor([3, 4], dtype=torch.int32)

    def step(q: Any, k: Any, v: Any, lens: Any, pools: Any) -> Any:
        return fa2.flash_attn_with_kvcache(q, *pools, k, v, cache_seqlens=lens, causal=True)

    graph, other = make_fx(step)(q, k, v, lens, pools.clone()), pools.clone()
    assert torch.equal(graph(q, k, v, lens, other), step(q, k, v, lens, pools)) and torch.equal(other, pools)


@pytest.mark.parametrize("wrong", ["one length", "int64", "starts"])
def test_lengths_beside_new_rows(wrong: str) -> None:
    """Adding the rows hides no fault of theirs."""
    q, new, pools, lens = make(5, 4, 8), make(2, 5, 2, 8), make(2, 3, 16, 2, 8), torch.tensor([3, 4, 5], dtype=torch.int32)
    starts = torch.tensor([0, 1, 3, 5], dtype=torch.int32)
    changed = {"one length": (lens[:1], starts), "int64": (lens.long(), starts), "starts": (lens, starts.long())}
    said = {"one length": "cu_seqlens_q has shape", "int64": "cache_seqlens has dtype int64", "starts": "cu_seqlens_q has dtype"}
    for given, message in (((lens, starts), None), (changed[wrong], said[wrong])):
        with pytest.raises(ProblemError, match=message) if message else contextlib.nullcontext():
            fa3.flash_attn_with_kvcache(q, *pools, *new, cache_seqlens=given[0], cu_seqlens_q=given[1], causal=True)


def test_scales_of_caches() -> None:
    """k_descale and v_descale are those of a cache in eight bits, which new keys and values are divided by."""
    pools = make(2, 12, 2, 16).to(torch.float8_e4m3fn), make(2, 12, 2, 16).to(torch.float8_e4m3fn)
    q, k, v, lens = make(2, 1, 4, 16), make(2, 1, 2, 16), make(2, 1, 2, 16), torch.tensor([3, 9], dtype=torch.int32)
    scales = torch.tensor([[0.5, 1.0], [2.0, 0.25]]), torch.tensor([[1.0, 3.0], [0.1, 0.2]])
    other = rawattn.KVCache(*(x.clone() for x in pools), "NHD", *scales)
    given = {"cache_seqlens": lens, "k_descale": scales[0], "v_descale": scales[1]}
    found = fa3.flash_attn_with_kvcache(q, *pools, k, v, **given)
    assert torch.equal(found, rawattn.attention_append(q, k, v, other, rawattn.Step(lens + 1, causal=False)))
    assert torch.equal(pools[0].float(), other.k.float()) and torch.equal(pools[1].float(), other.v.float())
    with pytest.raises(UnsupportedError, match="q_descale is"):
        fa3.flash_attn_with_kvcache(q, *pools, k, v, **given, q_descale=scales[0])
    with pytest.raises(UnsupportedError, match="k_descale is"):
        fa3.flash_attn_func(q, q, q, k_descale=scales[0])


def test_refusals() -> None:
    q = make(1, 4, 2, 16)
    starts, pages = torch.tensor([0, 4], dtype=torch.int32), torch.zeros((1, 1), dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"dropout_p is 0.1; rawattn does not have it yet"):
        fa2.flash_attn_varlen_func(q[0], q, q, starts, starts, 4, 4, dropout_p=0.1, block_table=pages)
    with pytest.raises(UnsupportedError, match=r"attention_chunk was given beside window_size=\(3, 0\)"):
        fa3.flash_attn_with_kvcache(q, q, q, attention_chunk=3, window_size=(3, 0))
    with pytest.raises(UnsupportedError, match="attention_chunk was given beside cache_leftpad"):
        fa3.flash_attn_with_kvcache(q, q, q, attention_chunk=3, cache_leftpad=torch.zeros(1, dtype=torch.int32))
    for name, value in {"qv": q, "q_descale": torch.ones(1), "attention_chunk": 4}.items():
        with pytest.raises(UnsupportedError, match=f"{name} is .*rawattn does not have it yet"):
            fa3.flash_attn_func(q, q, q, **{name: value})
    for door in (fa2, fa3):
        with pytest.raises(ProblemError, match="window_size is None; it must be a pair"):
            door.flash_attn_func(q, q, q, window_size=None)
    with pytest.raises(ProblemError, match="k was given without cache_seqlens"):
        fa2.flash_attn_with_kvcache(q, q, q, q, q)
    with pytest.raises(ProblemError, match="cache_seqlens is '3'; it must be an int32 tensor"):
        fa2.flash_attn_with_kvcache(q, q, q, cache_seqlens="3")
    with pytest.raises(ProblemError, match="cache_batch_idx was given beside"):
        ints = torch.zeros(1, dtype=torch.int32)
        fa2.flash_attn_with_kvcache(q, q, q, cache_batch_idx=ints, block_table=ints[None])
    with pytest.raises(ProblemError, match="cu_seqlens_k_new is not cu_seqlens_q"):
        fa3.flash_attn_with_kvcache(q, q, q, cu_seqlens_q=torch.zeros(2), cu_seqlens_k_new=torch.ones(2))
    assert torch.equal(fa2.flash_attn_func(q, q, q, dropout_p=0), fa2.flash_attn_func(q, q, q))


def test_dropout() -> None:
    q = make(1, 40, 2, 16)
    starts = torch.tensor([0, 40], dtype=torch.int32)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results += [fa2.flash_attn_func(q, q, q, dropout_p=0.3)]
        torch.manual_seed(3)
        results += [fa2.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 40, 40, dropout_p=0.3)[None]]
    assert all(torch.equal(results[0], each) for each in results)
    assert not torch.equal(results[0], fa2.flash_attn_func(q, q, q))


@pytest.mark.parametrize("slopes", [torch.tensor([0.5, 0.1]), torch.tensor([[0.5, 0.1], [0.0, 1.0]])], ids=["heads", "batch"])
def test_alibi(slopes: Any) -> None:
    q, k, v = make(2, 15, 2, 32), make(2, 20, 2, 32, seed=1), make(2, 20, 2, 32, seed=2)
    bias = -slopes.expand(2, 2)[:, :, None, None] * (torch.arange(15)[:, None] + 5 - torch.arange(20)).abs()
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=bias)
    check([fa2.flash_attn_func(q, k, v, alibi_slopes=slopes)], [wanted.transpose(1, 2)])
    check([fa2.flash_attn_func(q, k, v, alibi_slopes=slopes, softcap=1e4)], [wanted.transpose(1, 2)])
    starts_q, starts_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (15, 20))
    packed = (x.flatten(0, 1) for x in (q, k, v))
    o = fa2.flash_attn_varlen_func(*packed, starts_q, starts_k, 15, 20, alibi_slopes=slopes)
    check([o.unflatten(0, (2, 15))], [wanted.transpose(1, 2)])
    check([fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=20, alibi_slopes=slopes)], [wanted.transpose(1, 2)])
    pages = k.unflatten(1, (5, 4)).flatten(0, 1), v.unflatten(1, (5, 4)).flatten(0, 1)
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    o = fa2.flash_attn_varlen_func(q.flatten(0, 1), *pages, starts_q, starts_k, 15, 20, alibi_slopes=slopes, block_table=table)
    check([o.unflatten(0, (2, 15))], [wanted.transpose(1, 2)])


def test_chunks_over_a_cache() -> None:
    q, k, v = make(2, 3, 2, 32), make(2, 20, 2, 32, seed=1), make(2, 20, 2, 32, seed=2)
    at, keys = torch.arange(17, 20)[:, None], torch.arange(20)
    kept = (at // 6 == keys // 6) & (keys <= at)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=kept)
    check([fa3.flash_attn_with_kvcache(q, k, v, causal=True, attention_chunk=6)], [wanted.transpose(1, 2)])


def test_hints_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q = make(1, 4, 2, 16)
    monkeypatch.setattr(fa2, "_ignored", set())
    with pytest.warns(UserWarning, match="pack_gqa is a hint") as seen:
        for _ in range(2):
            fa3.flash_attn_func(q, q, q, pack_gqa=True, num_splits=3)
    assert len(seen) == 2 and {each.filename for each in seen} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa3.flash_attn_func(q, q, q, num_splits=0, pack_gqa=False)


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    fa2.uninstall()
    for name in fa2.MODULES:
        sys.modules.pop(name, None)


def test_install(clean: None) -> None:
    fa2.install()
    fa2.install()
    import flash_attn
    import flash_attn.flash_attn_interface as two
    import flash_attn_interface as three
    from flash_attn import flash_attn_func

    assert flash_attn_func is fa2.flash_attn_func is two.flash_attn_func and three.flash_attn_func is fa3.flash_attn_func
    assert flash_attn.flash_attn_interface is two and flash_attn.__version__.startswith("2.")
    assert {name for module, name in SIGNATURES if module is fa2} == set(flash_attn.__all__)
    assert {name for module, name in SIGNATURES if module is fa3} == set(three.__all__)
    with pytest.raises(ModuleNotFoundError):
        import flash_attn.bert_padding
    import importlib.util

    assert importlib.util.find_spec("flash_attn") is flash_attn.__spec__
    fa2.uninstall()
    assert not set(fa2.MODULES) & set(sys.modules)


@pytest.mark.parametrize("name", fa2.MODULES)
def test_install_beside_the_real_one(name: str, clean: None) -> None:
    real = sys.modules[name] = types.ModuleType(name)
    real.__file__ = "site-packages/real.py"
    with pytest.raises(ProblemError, match=r"is loaded, from site-packages/real.py"):
        fa2.install()
    assert {each for each in fa2.MODULES if each in sys.modules} == {name}
    fa2.uninstall()
    assert sys.modules[name] is real


def test_nothing_is_installed_by_import() -> None:
    code = "import sys, rawattn.integrations.flash_attn; assert not {'flash_attn', 'flash_attn_interface'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
