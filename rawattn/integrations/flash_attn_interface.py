"""The functions of flash-attn 3, with their signatures, computed by rawattn; ``flash_attn`` beside it says what holds for both.

>>> from rawattn.integrations.flash_attn_interface import flash_attn_func
>>> o = flash_attn_func(q, k, v, causal=True)

Besides, refused are qv, q in eight bits and its descale factor. ``flash_attn_with_kvcache`` takes caches of e4m3 and e5m2 with
k_descale and v_descale, and q in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch

from ..api import attention
from ..api.naming import naming
from ..errors import ProblemError
from ..serving.merge import merge_states
from .flash_attn import APART, IN_CACHE, NAMES, Window, backward, ignore, options_of, refuse, unpack, varlen
from .flash_attn_kvcache import with_kvcache

__version__ = "3.0.0+rawattn"
_PAGES = {"page_table": "page_table"}
_NAMES = NAMES | _PAGES


@naming(**_NAMES)
def flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes attention of q, (batch, q_len, heads, head_dim), and k and v; with return_attn_probs (o, lse)."""
    _refuse(qv, q_descale, k_descale, v_descale)
    if num_splits != 1 or pack_gqa is not None or sm_margin:
        ignore(num_splits=(num_splits, 0, 1), pack_gqa=(pack_gqa, None), sm_margin=(sm_margin, 0))
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic, None, attention_chunk)
    return attention.attention(q, k, v, return_lse=return_attn_probs, **options)


def flash_attn_qkvpacked_func(
    qkv: Any, softmax_scale: float | None = None, causal: bool = False, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_func`` of qkv, (batch, length, 3, heads, head_dim), or with num_heads_q (batch, length, heads + 2
    kv_heads, head_dim)."""
    if num_heads_q is None:
        q, k, v = unpack("qkv", qkv, "batch, length, 3, heads, head_dim")
    elif len(shape := tuple(getattr(qkv, "shape", ()))) != 4 or (shape[2] - num_heads_q) % 2:
        raise ProblemError(f"qkv has shape {shape}; with num_heads_q its third must be heads + 2 kv_heads.")
    else:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@naming(**_NAMES, kv_lens="seqused_k")
def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, seqused_q: Any = None,
    seqused_k: Any = None, softmax_scale: float | None = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes attention of sequences that lie end to end; with return_attn_probs (o, lse)."""
    _refuse(qv, q_descale, k_descale, v_descale)
    if num_splits != 1 or pack_gqa is not None or sm_margin:
        ignore(num_splits=(num_splits, 0, 1), pack_gqa=(pack_gqa, None), sm_margin=(sm_margin, 0))
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic, None, attention_chunk)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return varlen(q, k, v, starts, longest, options, return_attn_probs, None, (seqused_q, seqused_k))


@naming(**IN_CACHE | _PAGES)
def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None, rotary_cos: Any = None,
    rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    page_table: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes k and v into the cache behind cache_seqlens, and computes attention of q over all that is in it then."""
    _refuse(qv, q_descale)
    hints = {"num_splits": (num_splits, 0, 1), "pack_gqa": (pack_gqa, None), "sm_margin": (sm_margin, 0)}
    is_ours = isinstance(scheduler_metadata, torch.Tensor) and not scheduler_metadata.numel()
    ignore(**hints, scheduler_metadata=(None if is_ours else scheduler_metadata, None))
    rotary = (rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    places = (cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    options = options_of(softmax_scale, causal, window_size, softcap, chunk=attention_chunk, first=cache_leftpad)
    arguments = (k_cache, v_cache), (k, v), rotary, places
    more = cu_seqlens_q, max_seqlen_q, (k_descale, v_descale), cu_seqlens_k_new
    return with_kvcache(q, *arguments, options, return_softmax_lse, *more)


@naming(
    cache_seqlens="seqused_k", cache_batch_idx="kv_batch_idx", cache_leftpad="leftpad_k", rotary_seqlens="seqlens_rotary",
    k_cache="k", v_cache="v",
)  # fmt: skip
def _flash_attn_forward(
    q: Any, k: Any, v: Any, k_new: Any = None, v_new: Any = None, qv: Any = None, out_: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, cu_seqlens_k_new: Any = None, seqused_q: Any = None, seqused_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, page_table: Any = None, kv_batch_idx: Any = None,
    leftpad_k: Any = None, rotary_cos: Any = None, rotary_sin: Any = None, seqlens_rotary: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Any = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:  # fmt: skip
    """Computes (o, lse, None, None) for callers with a backward of their own: of packed keys where cu_seqlens_k says where they
    begin, and over a cache where another argument asks for one."""
    refuse(out_=(out_, None))
    window = window_size_left, window_size_right
    options = softmax_scale, causal, qv, q_descale, k_descale, v_descale, window, attention_chunk, softcap, num_splits, pack_gqa
    rows = {"k_new": k_new, "kv_batch_idx": kv_batch_idx, "leftpad_k": leftpad_k, "page_table": page_table}
    if cu_seqlens_k is not None:
        refuse(**{name: (x, None) for name, x in rows.items()})
        packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
        return *flash_attn_varlen_func(q, k, v, *packed, *options, False, sm_margin, True), None, None
    refuse(seqused_q=(seqused_q, None))
    if cu_seqlens_q is seqused_k is None and all(x is None for x in rows.values()):
        return *flash_attn_func(q, k, v, *options, False, sm_margin, True), None, None
    places = seqused_k, kv_batch_idx, leftpad_k, page_table, cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary
    results = flash_attn_with_kvcache(
        q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, *places, q_descale, k_descale, v_descale, softmax_scale, causal,
        window, attention_chunk, softcap, rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, True,
    )  # fmt: skip
    return *results, None, None


@naming(**_NAMES | APART | {"causal": "is_causal", "q_lens": "sequed_q", "kv_lens": "sequed_k"})
def _flash_attn_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    sequed_q: Any = None, sequed_k: Any = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Any = None,
    dk: Any = None, dv: Any = None, softmax_scale: float | None = None, is_causal: bool = False, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> None:  # fmt: skip
    """Writes the gradients into dq, dk and dv."""
    ignore(sm_margin=(sm_margin, 0))
    options = options_of(softmax_scale, is_causal, (window_size_left, window_size_right), softcap, deterministic)
    packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_k, "q_lens": sequed_q, "kv_lens": sequed_k}
    if cu_seqlens_q is not None:
        packed |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_k}
    backward((dout, q, k, v, out, softmax_lse), (dq, dk, dv), options, **packed)


@naming(parts="out_partial")
def flash_attn_combine(out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None) -> Any:
    """Merges o, (splits, batch, length, heads, head_dim), and lse, (splits, batch, length, heads), each over keys of its own.
    Gives o, in ``out`` or of out_dtype, and lse, (batch, length, heads)."""
    shape, lse_shape = (tuple(getattr(x, "shape", ())) for x in (out_partial, lse_partial))
    if len(shape) not in (4, 5):
        raise ProblemError(f"out_partial has shape {shape}; it must be (splits, batch, length, heads, head_dim).")
    if lse_shape != shape[:-1]:
        raise ProblemError(f"lse_partial has shape {lse_shape}; it must be {shape[:-1]}, that of out_partial without head_dim.")
    if out is not None and (tuple(out.shape) != shape[1:] or out_dtype not in (None, out.dtype)):
        words = f"out has dtype {out.dtype} and shape {tuple(out.shape)}"
        raise ProblemError(f"{words}; it must have {out_dtype or 'any dtype'} and shape {shape[1:]}.")
    o, lse = merge_states([(o, lse.transpose(-1, -2)) for o, lse in zip(out_partial, lse_partial, strict=True)])
    return o.to(out_dtype or o.dtype) if out is None else out.copy_(o), lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int, cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16, headdim_v: int | None = None, cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None, page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: Window = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Any:  # fmt: skip
    """Gives a tensor without elements, on the device of cache_seqlens: rawattn needs no plan of a step."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _refuse(qv: Any, q_descale: Any, k_descale: Any = None, v_descale: Any = None) -> None:
    if not qv is q_descale is k_descale is v_descale is None:
        descales = {"q_descale": (q_descale, None), "k_descale": (k_descale, None), "v_descale": (v_descale, None)}
        refuse(qv=(qv, None), **descales)
