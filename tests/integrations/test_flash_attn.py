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
SIDES = "window_size_left window_size_right"
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
    (fa2, "_flash_attn_forward"): f"q k v dropout_p softmax_scale causal {SIDES} softcap alibi_slopes return_softmax",
    (fa2, "_flash_attn_varlen_forward"): f"q k v {VARLEN} dropout_p softmax_scale causal window_size_left=-1 "
    "window_size_right=-1 softcap=0.0 alibi_slopes=None return_softmax=False block_table=None leftpad_k=None seqused_k=None",
    (fa2, "_flash_attn_backward"): f"dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal {SIDES} softcap "
    "alibi_slopes deterministic rng_state=None",
    (fa2, "_flash_attn_varlen_backward"): f"dout q k v out softmax_lse dq dk dv {VARLEN} dropout_p softmax_scale causal {SIDES} "
    "softcap alibi_slopes deterministic rng_state=None",
    (fa3, "_flash_attn_forward"): "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
    "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None page_table=None kv_batch_idx=None "
    f"leftpad_k=None rotary_cos=None rotary_sin=None seqlens_rotary=None {SCALES} softmax_scale=None causal=False "
    "window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None "
    "num_splits=1 pack_gqa=None sm_margin=0",
    (fa3, "_flash_attn_backward"): "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None sequed_k=None "
    "max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None softmax_scale=None is_causal=False window_size_left=-1 "
    "window_size_right=-1 softcap=0.0 deterministic=False sm_margin=0",
    (fa3, "flash_attn_combine"): "out_partial lse_partial out=None out_dtype=None",
    (fa3, "get_scheduler_metadata"): "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None "
    "max_seqlen_k_new=0 causal=False window_size=(-1, -1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None "
    "sm_margin=0",
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
    for adapter in (fa2, fa3):
        with pytest.raises(ProblemError, match=r"qkv is a Tensor of shape \(2, 20, 8, 32\); it must be a tensor, \(batch"):
            adapter.flash_attn_qkvpacked_func(qkv)


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
    with pytest.raises(ProblemError, match="rotary_cos was given without k"):
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, **rotary, **cache.places)
    with pytest.raises(ProblemError, match="rotary_sin was given without rotary_cos"):
        fa2.flash_attn_with_kvcache(q, cache.k, cache.v, k, v, rotary_sin=sin, **cache.places)


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
    for name, value in {"qv": q, "q_descale": torch.ones(1)}.items():
        with pytest.raises(UnsupportedError, match=f"{name} is .*rawattn does not have it yet"):
            fa3.flash_attn_func(q, q, q, **{name: value})
    for adapter in (fa2, fa3):
        with pytest.raises(ProblemError, match="window_size is None; it must be a pair"):
            adapter.flash_attn_func(q, q, q, window_size=None)
    with pytest.raises(ProblemError, match="k was given without cache_seqlens"):
        fa2.flash_attn_with_kvcache(q, q, q, q, q)
    with pytest.raises(ProblemError, match="cache_seqlens is '3'; it must be an int32 tensor"):
        fa2.flash_attn_with_kvcache(q, q, q, cache_seqlens="3")
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


def test_pages_beside_autograd() -> None:
    """A result over pages requires grad as q does, and a backward through it raises in words."""
    cache, starts = Cache("cpu", pages=True), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    q, ends = make(5, 4, 32, seed=9), torch.tensor([0, 40, 40, 57], dtype=torch.int32)
    call = lambda q: fa2.flash_attn_varlen_func(  # noqa: E731
        q, cache.k, cache.v, starts, ends, 3, 40, causal=True, return_attn_probs=True, block_table=cache.table
    )
    o, lse, _ = call(q.clone().requires_grad_())
    wanted = call(q)
    assert torch.equal(o, wanted[0]) and torch.equal(lse, wanted[1]) and o.requires_grad and not wanted[0].requires_grad
    for each in (o * 2, lse):
        with pytest.raises(ProblemError, match="over pages, which have no gradient; leave block_table out"):
            each.sum().backward()
    with torch.no_grad():
        assert not call(q.clone().requires_grad_())[0].requires_grad


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize(("module", "dropout"), [(fa2, 0.0), (fa2, 0.3), (fa3, 0.0)], ids=["2", "2 with dropout", "3"])
def test_forward_and_backward_apart(module: Any, packed: bool, dropout: float) -> None:
    """As callers with a backward of their own write them, into parts of larger buffers."""
    shapes = [(2, 15, 4, 16), (2, 15, 2, 16), (2, 15, 2, 16), (2, 15, 4, 16)]
    q, k, v, do = (make(*shape, seed=i).flatten(0, 1 if packed else 0) for i, shape in enumerate(shapes))
    starts = torch.tensor([0, 15, 30], dtype=torch.int32)
    ends = (starts, starts, 15, 15)
    buffers = [torch.full((2, *x.shape), torch.nan)[1] for x in (q, k, v)]
    sides, name = {"window_size_left": 6, "window_size_right": 0}, "varlen_" if packed else ""
    torch.manual_seed(5)
    if module is fa2:
        forward, backward = (getattr(fa2, f"_flash_attn_{name}{which}") for which in ("forward", "backward"))
        more = {"dropout_p": dropout, "softmax_scale": 0.2, "causal": False, "softcap": 3.0, "alibi_slopes": None, **sides}
        o, lse, probs, seed = forward(q, k, v, *(ends if packed else ()), return_softmax=False, **more)
        assert probs is None and (seed is None) == (not dropout)
        more |= {"deterministic": False, "rng_state": seed}
        assert backward(do, q, k, v, o, lse, *buffers, *(ends if packed else ()), **more) is None
    else:
        more = {"softmax_scale": 0.2, "softcap": 3.0, **sides}
        if packed:
            more |= dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), ends, strict=True))
        o, lse, *rest = fa3._flash_attn_forward(q, k, v, **more)
        assert rest == [None, None]
        fa3._flash_attn_backward(do, q, k, v, o, lse, dq=buffers[0], dk=buffers[1], dv=buffers[2], **more)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(5)
    options = {"window_size": (6, 0), "softmax_scale": 0.2, "softcap": 3.0, "return_attn_probs": True}
    options |= {"dropout_p": dropout} if dropout else {}
    called = module.flash_attn_varlen_func(*given, *ends, **options) if packed else module.flash_attn_func(*given, **options)
    assert torch.equal(o, called[0]) and torch.equal(lse, called[1])
    for x, y in zip(buffers, torch.autograd.grad(called[0], given, do), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(ProblemError, match="dk is None; it must be a tensor, which receives the gradient"):
        module.backward((do, q, k, v, o, lse), (buffers[0], None, buffers[2]), {})


def test_the_forward_of_3_over_a_cache() -> None:
    """It is what ``flash_attn_with_kvcache`` and ``flash_attn_varlen_func`` give."""
    cache, starts = Cache("cpu", pages=True, new=1), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    q, places = make(3, 4, 32, seed=9), {"page_table": cache.table, "causal": True, "cu_seqlens_q": starts, "max_seqlen_q": 1}
    new = [x.flatten(0, 1).contiguous() for x in cache.added.unbind(2)]
    other, lens = Cache("cpu", pages=True, new=1), cache.places["cache_seqlens"]
    o, lse, *_ = fa3._flash_attn_forward(q, cache.k, cache.v, *new, seqused_k=lens, **places)
    found = fa3.flash_attn_with_kvcache(q, other.k, other.v, *new, cache_seqlens=lens, **places, return_softmax_lse=True)
    assert torch.equal(o, found[0]) and torch.equal(lse, found[1]) and torch.equal(cache.k.nan_to_num(), other.k.nan_to_num())
    with pytest.raises(UnsupportedError, match="page_table is a Tensor"):
        fa3._flash_attn_forward(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, page_table=cache.table)
    with pytest.raises(ProblemError, match=r"seqused_k\[0\] is 99"):
        fa3._flash_attn_forward(make(3, 1, 4, 32), cache.k, cache.v, seqused_k=lens + 59, page_table=cache.table)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_combine(dtype: Any, device: str) -> None:
    """Splits of which some have no key for some rows, as they lie in larger arrays."""
    parts = make(6, 2, 4, 5, 32, device=device, dtype=torch.float32).transpose(2, 3)[:3]
    lse = make(3, 2, 8, 5, device=device, dtype=torch.float32, seed=1).transpose(-1, -2)[..., :4]
    lse[1:, :1] = -torch.inf
    total = torch.logsumexp(lse.double(), 0)
    wanted = (torch.exp(lse.double() - total)[..., None] * parts.double()).sum(0)
    out = torch.full((2, 5, 4, 32), torch.nan, device=device, dtype=dtype)
    for given in ({"out_dtype": dtype}, {"out": out}):
        o, found = fa3.flash_attn_combine(parts, lse, **given)
        assert o.dtype == (dtype or torch.float32) and (o is out) == ("out" in given)
        check((o, found), (wanted.cpu(), total.cpu()))
    with pytest.raises(ProblemError, match=r"lse_partial has shape \(3, 2, 4, 5\); it must be \(3, 2, 5, 4\)"):
        fa3.flash_attn_combine(parts, lse.transpose(-1, -2))
    with pytest.raises(ProblemError, match="out has dtype"):
        fa3.flash_attn_combine(parts, lse, out=out, out_dtype=torch.float64)


def test_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing, and is taken without a word."""
    cache = Cache("cpu", pages=True)
    metadata = fa3.get_scheduler_metadata(3, 2, 64, 4, 2, 32, cache.places["cache_seqlens"], torch.float32, page_size=16)
    assert metadata.numel() == 0 and metadata.dtype is torch.int32
    monkeypatch.setattr(fa2, "_ignored", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        q = make(3, 2, 4, 32, seed=9)
        o = fa3.flash_attn_with_kvcache(q, cache.k, cache.v, **cache.given(fa3), scheduler_metadata=metadata)
    check([o], cache.wanted(q)[:1])


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
    for module, names in ((fa2, flash_attn), (fa2, two), (fa3, three)):
        assert {name for each, name in SIGNATURES if each is module and name[0] != "_"} == set(names.__all__)
        assert all(getattr(names, name) is getattr(each, name) for each, name in SIGNATURES if each is module)
    import flash_attn_3
    from flash_attn_3.flash_attn_interface import _flash_attn_forward

    assert _flash_attn_forward is fa3._flash_attn_forward is flash_attn_3.flash_attn_interface._flash_attn_forward
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
