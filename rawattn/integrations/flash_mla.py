"""FlashMLA's functions, by ``rawattn.attention_kvcache`` over latent caches: ``flash_mla_with_kvcache``, dense and with indices,
and ``flash_mla_sparse_fwd``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..api.naming import naming
from ..errors import ProblemError, UnsupportedError
from ..operation.keys import TopK
from ..serving import KVCache, Step
from ..serving.attention import attention_kvcache
from ..serving.merge import merge_states
from ..variant.element import FP8_DS_MLA

BYTES = torch.uint8, torch.int8, torch.float8_e4m3fn  # which a cache of records may be said to hold
GATHERED = 1 << 24  # numbers of keys that are copied at once for max_logits


@dataclasses.dataclass
class FlashMLASchedMeta:
    """This is what FlashMLA plans its launches by; rawattn plans nothing."""

    have_initialized: bool = False


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Returns an empty object, as FlashMLA does; any arguments are taken."""
    return FlashMLASchedMeta(), None


@naming(k="k_cache", pages="k_cache", kv_lens="cache_seqlens", page_table="block_table", sinks="attn_sink", scale="softmax_scale",
        positions="indices", counts="topk_length")  # fmt: skip
def flash_mla_with_kvcache(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, tile_scheduler_metadata: Any,
    num_splits: Any = None, softmax_scale: float | None = None, causal: bool = False, is_fp8_kvcache: bool = False,
    indices: Any = None, attn_sink: Any = None, extra_k_cache: Any = None, extra_indices_in_kvcache: Any = None,
    topk_length: Any = None, extra_topk_length: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Attention of q, (batch, seq_len_q, heads, 576), over a cache whose values are the first columns of its keys.

    >>> out, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, get_mla_metadata()[0], causal=True)

    k_cache is (blocks, block_size, kv_heads, 576) in q's dtype, or with ``is_fp8_kvcache`` (blocks, block_size, 1, 656) bytes.
    With ``indices``, (batch, seq_len_q, topk), a query attends to these rows of the cache, block * block_size + row, up to
    ``topk_length`` (batch,) of them, and block_table and cache_seqlens are not looked at. ``attn_sink`` changes out alone.
    ``tile_scheduler_metadata`` and ``num_splits`` are hints, ignored.

    Returns out, and lse in natural logarithms, (batch, heads, seq_len_q); a query without keys has out = 0 and lse = +inf.
    """
    extra = {"extra_k_cache": extra_k_cache, "extra_indices_in_kvcache": extra_indices_in_kvcache}
    for name, value in (extra | {"extra_topk_length": extra_topk_length}).items():
        if value is not None:
            raise UnsupportedError(
                f"{name} was given; rawattn attends to one cache: leave it out, or merge by rawattn.merge_states."
            )
    if indices is None and (block_table is None or cache_seqlens is None):
        raise ProblemError("block_table or cache_seqlens is None; without indices both must be arrays.")
    if indices is None and topk_length is not None:
        raise ProblemError("topk_length was given without indices; it says how many of these count.")
    if indices is not None and causal:
        raise ProblemError("causal is True beside indices, which say the keys of each query; it must be False.")
    cache = _make_cache(k_cache, head_dim_v, is_fp8_kvcache)
    if indices is None:
        step = Step(cache_seqlens, block_table, causal=causal)
    else:
        _check_indices("indices", indices, (*q.shape[:2], "topk"))
        counts = None if topk_length is None else topk_length[:, None].expand(-1, q.shape[1]).flatten()
        step = Step(None, None, causal=False, keys=TopK(indices.flatten(0, 1), counts, physical=True))
    return _attend(q, cache, step, softmax_scale, attn_sink)


@naming(k="kv", scale="sm_scale", sinks="attn_sink", positions="indices", counts="topk_length")
def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, attn_sink: Any = None, topk_length: Any = None,
    indexer_topk: int = 0, *, with_max_logits: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Attention of each row of q, (rows, heads, 576), over the rows of kv, (keys, 1, 576), in ``indices``, (rows, 1, topk).

    >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, sm_scale=192**-0.5)

    Numbers below 0 and from the number of keys up are none; ``topk_length``, (rows,), says how many count. ``attn_sink`` changes
    out alone. ``with_max_logits=False``, which FlashMLA does not have, gives None in their place: no kernel keeps them, and torch
    computes all logits once more.

    Returns out, the largest logits, -inf where there is no key, and lse in natural logarithms, +inf there; both (rows, heads).
    """
    if indexer_topk:
        raise UnsupportedError(f"indexer_topk is {indexer_topk}; rawattn gives no second lse: call once more with these indices.")
    if len(kv.shape) != 3 or kv.shape[1] != 1:
        raise UnsupportedError(f"kv has shape {tuple(kv.shape)}; it must be (keys, 1, columns).")
    _check_indices("indices", indices, (q.shape[0], 1, "topk"))
    listed = indices[:, 0].where(indices[:, 0] < kv.shape[0], -1)  # a number beyond the keys would be reported
    step = Step(None, None, causal=False, keys=TopK(listed, topk_length, physical=True))
    out, lse = _attend(q[None], _make_cache(kv[None], d_v, False), step, sm_scale, attn_sink)
    largest = _find_max_logits(q, kv[:, 0], listed, topk_length, sm_scale) if with_max_logits else None
    return out[0], largest, lse[0].T.contiguous()


def _make_cache(k_cache: Any, head_dim_v: int, is_fp8: bool) -> KVCache:
    if not is_fp8:
        if k_cache.dtype in BYTES:
            raise ProblemError(f"k_cache has dtype {k_cache.dtype} but is_fp8_kvcache is False; records of bytes need True.")
        return KVCache(k_cache, k_cache[..., :head_dim_v])
    shape, record = tuple(k_cache.shape), FP8_DS_MLA
    if k_cache.dtype not in BYTES or len(shape) != 4 or shape[2:] != (1, record.bytes) or head_dim_v != record.head_dim_v:
        need = f"they must be bytes, (blocks, block_size, 1, {record.bytes}), and {record.head_dim_v}, where is_fp8_kvcache"
        raise UnsupportedError(f"k_cache is {k_cache.dtype} of shape {shape} and head_dim_v {head_dim_v}; {need}.")
    return KVCache.records(k_cache.view(torch.uint8)[:, :, 0], record)


def _check_indices(name: str, indices: Any, wanted: tuple[Any, ...]) -> None:
    shape = tuple(indices.shape)
    if len(shape) != 3 or shape[:2] != wanted[:2] or indices.dtype != torch.int32:
        words = ", ".join(map(str, wanted))
        raise ProblemError(f"{name} is {indices.dtype} of shape {shape}; it must be torch.int32 of shape ({words}).")


def _attend(q: Any, cache: KVCache, step: Step, scale: float | None, sink: Any) -> tuple[Any, Any]:
    """Computes o and lse, +inf for rows without keys; a sink is merged into o afterwards, and lse stays without it."""
    o, lse = attention_kvcache(q, cache, step, scale=scale, return_lse=True)
    if sink is not None:
        merge_states([(o, lse)], sinks=sink, out=o)
    return o, lse.masked_fill(lse == -torch.inf, torch.inf)


def _find_max_logits(q: Any, kv: Any, listed: Any, counts: Any, scale: float) -> Any:
    """Finds the largest logit of each row and head, some rows at a time."""
    found = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
    step = max(1, GATHERED // max(1, listed.shape[1] * kv.shape[1]))
    places = torch.arange(listed.shape[1], device=q.device)
    for first in range(0, len(q) if listed.shape[1] and len(kv) else 0, step):
        rows = slice(first, first + step)
        none = listed[rows] < 0
        if counts is not None:
            none = none | (places >= counts[rows, None])
        logits = q[rows].float() @ kv[listed[rows].masked_fill(none, 0)].float().transpose(1, 2) * scale
        found[rows] = logits.masked_fill(none[:, None], -torch.inf).amax(-1)
    return found
