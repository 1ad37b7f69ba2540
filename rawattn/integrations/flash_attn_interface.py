"""The functions of flash-attn 3, with their signatures, computed by rawattn; ``flash_attn`` beside it says what holds for both.

>>> from rawattn.integrations.flash_attn_interface import flash_attn_func
>>> o = flash_attn_func(q, k, v, causal=True)

Besides, refused are qv, q in eight bits and its descale factor, and attention_chunk without a cache. ``flash_attn_with_kvcache``
takes caches of e4m3 and e5m2 with k_descale and v_descale, and q in 16 bits.
"""

from __future__ import annotations

from typing import Any

from .. import api
from ..errors import ProblemError, UnsupportedError
from .flash_attn import IN_CACHE, NAMES, Window, ignore, options_of, refuse, unpacked, varlen, with_kvcache
from .naming import naming

__version__ = "3.0.0+rawattn"
_NAMES = NAMES | {"page_table": "page_table"}


@naming(**_NAMES)
def flash_attn_func(
    q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False, qv: Any = None, q_descale: Any = None,
    k_descale: Any = None, v_descale: Any = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes attention of q, (batch, q_len, heads, head_dim), and k and v; with return_attn_probs (o, lse)."""
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    if num_splits != 1 or pack_gqa is not None or sm_margin:
        ignore(num_splits=(num_splits, 0, 1), pack_gqa=(pack_gqa, None), sm_margin=(sm_margin, 0))
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
    return api.attention(q, k, v, return_lse=return_attn_probs, **options)


def flash_attn_qkvpacked_func(
    qkv: Any, softmax_scale: float | None = None, causal: bool = False, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, window_size: Window = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    deterministic: bool = False, num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Computes ``flash_attn_func`` of qkv, (batch, length, 3, heads, head_dim), or with num_heads_q (batch, length, heads + 2
    kv_heads, head_dim)."""
    if num_heads_q is None:
        q, k, v = unpacked("qkv", qkv, "batch, length, 3, heads, head_dim")
    elif qkv.dim() != 4 or (qkv.shape[2] - num_heads_q) % 2:
        raise ProblemError(f"qkv has shape {tuple(qkv.shape)}; with num_heads_q its third must be heads + 2 kv_heads.")
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
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    if num_splits != 1 or pack_gqa is not None or sm_margin:
        ignore(num_splits=(num_splits, 0, 1), pack_gqa=(pack_gqa, None), sm_margin=(sm_margin, 0))
    options = options_of(softmax_scale, causal, window_size, softcap, deterministic)
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    return varlen(q, k, v, starts, longest, options, return_attn_probs, None, (seqused_q, seqused_k))


@naming(**_NAMES, **IN_CACHE)
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
    _refuse(qv, q_descale, None, None, 0)
    refuse(rotary_seqlens=(rotary_seqlens, None))
    if cu_seqlens_k_new is not None and cu_seqlens_k_new is not cu_seqlens_q:
        raise ProblemError("cu_seqlens_k_new is not cu_seqlens_q; it must be the same tensor, as many new keys as queries.")
    hints = {"num_splits": (num_splits, 0, 1), "pack_gqa": (pack_gqa, None), "sm_margin": (sm_margin, 0)}
    ignore(**hints, scheduler_metadata=(scheduler_metadata, None))
    rotary = (rotary_cos, rotary_sin, rotary_interleaved)
    places = (cache_seqlens, cache_batch_idx, cache_leftpad, page_table)
    options = options_of(softmax_scale, causal, window_size, softcap) | _chunks(attention_chunk, cache_leftpad, window_size)
    found = (k_cache, v_cache), (k, v), rotary, places
    return with_kvcache(q, *found, options, return_softmax_lse, cu_seqlens_q, max_seqlen_q, (k_descale, v_descale))


def _chunks(size: int, first: Any, window: Window) -> dict[str, Any]:
    """The mask by which a query keeps keys of its own chunk of so many positions."""
    if not size:
        return {}
    if first is not None:
        raise UnsupportedError("attention_chunk was given beside cache_leftpad, from which chunks count there; give 0.")
    if tuple(window) != (-1, -1):
        raise UnsupportedError(f"attention_chunk was given beside window_size={window}; give (-1, -1).")
    return {"mask": lambda q, kv: q // size == kv // size}


def _refuse(qv: Any, q_descale: Any, k_descale: Any, v_descale: Any, attention_chunk: int) -> None:
    if qv is q_descale is k_descale is v_descale is None and attention_chunk == 0:
        return
    descales = {"q_descale": (q_descale, None), "k_descale": (k_descale, None), "v_descale": (v_descale, None)}
    refuse(qv=(qv, None), attention_chunk=(attention_chunk, 0), **descales)
