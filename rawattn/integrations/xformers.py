"""xformers' ``memory_efficient_attention``, with its signature and its classes of biases, computed by rawattn.

>>> from rawattn.integrations.xformers import memory_efficient_attention
>>> o = memory_efficient_attention(q, k, v, attn_bias=xformers.ops.LowerTriangularMask())

``install`` puts the functions in the place of xformers' own. Biases are known by the names of their classes, so that xformers
itself is not needed. ``op`` is a hint; it is ignored, with a warning. A query that keeps no key gives 0. Lengths of padded keys,
which a bias has, are read on the device.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from .. import mask, serving
from ..api import attention
from ..api.naming import naming
from ..array import reading
from ..errors import ProblemError, UnsupportedError
from ..serving.attention import attention_kvcache
from .flash_attn import ignore


def memory_efficient_attention(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *, op: Any = None,
    output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Computes attention of query, (batch, length, heads, head_dim), (batch, length, groups, heads, head_dim) or, of one head,
    (batch, length, head_dim). p is the probability of dropout, which draws from torch's generator."""
    return _attend(query, key, value, attn_bias, p, scale, op, output_dtype, False)[0]


def memory_efficient_attention_forward(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *, op: Any = None,
    output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Computes ``memory_efficient_attention`` without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, op=op, output_dtype=output_dtype)


def memory_efficient_attention_partial(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *, op: Any = None,
    output_dtype: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Computes o and lse, (batch, heads, length), or (batch, groups, heads, length)."""
    return _attend(query, key, value, attn_bias, p, scale, op, output_dtype, True)


def _read_window(bias: Any) -> dict[str, Any]:
    return {"window": (bias.window_left, bias.window_right)}


def _read_local(bias: Any) -> dict[str, Any]:
    return {"window": (bias._window_size - 1, 0)}


def _read_local_top_left(bias: Any) -> dict[str, Any]:
    return {"mask": mask.Window(bias._window_size - 1, 0, "top_left")}


def _read_top_left(bias: Any) -> dict[str, Any]:
    return {"mask": mask.Causal("top_left")}


def _read_biased(bias: Any) -> dict[str, Any]:
    return {"mask": mask.Causal("top_left"), "bias": _reshape_bias(bias._bias)}


def _read_causal(bias: Any) -> dict[str, Any]:
    return {"causal": True}


def _read_full(bias: Any) -> dict[str, Any]:
    return {}


OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {  # of rawattn.attention, that each class means
    "LowerTriangularMask": _read_top_left,
    "LowerTriangularMaskWithTensorBias": _read_biased,
    "LowerTriangularFromBottomRightMask": _read_causal,
    "LowerTriangularFromBottomRightLocalAttentionMask": _read_local,
    "LocalAttentionFromBottomRightMask": _read_window,
    "BlockDiagonalMask": _read_full,
    "BlockDiagonalCausalMask": _read_top_left,
    "BlockDiagonalCausalFromBottomRightMask": _read_causal,
    "BlockDiagonalCausalLocalAttentionMask": _read_local_top_left,
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _read_local,
    "BlockDiagonalPaddedKeysMask": _read_full,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _read_causal,
    "BlockDiagonalLocalAttentionPaddedKeysMask": _read_window,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _read_local,
    "BlockDiagonalGappyKeysMask": _read_full,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _read_causal,
    "PagedBlockDiagonalPaddedKeysMask": _read_full,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _read_causal,
}


@naming(q="query", k="key", v="value", bias="attn_bias", dropout="p")
def _attend(
    query: Any, key: Any, value: Any, bias: Any, p: float, scale: float | None, op: Any, output_dtype: Any, return_lse: bool
) -> tuple[Any, Any]:
    """Computes o and lse, or None for lse, in xformers' shapes."""
    if output_dtype is not None and output_dtype != query.dtype:
        raise UnsupportedError(f"output_dtype is {output_dtype}; rawattn gives o in query's dtype, {query.dtype}.")
    ignore(op=(op, None))
    if not 3 <= query.dim() <= 5 or not query.dim() == key.dim() == value.dim():
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ProblemError(f"query, key and value have the shapes {shapes}; they must have 3, 4 or 5 dimensions, all as many.")
    options: dict[str, Any] = {"scale": scale, "return_lse": True} if return_lse else {"scale": scale}
    if p:
        options["dropout"] = p
    results = _dispatch(_join_heads(query, key, value), bias, options)
    o, lse = results if return_lse else (results, None)
    if query.dim() == 5:
        return o.unflatten(2, query.shape[2:4]), None if lse is None else lse.unflatten(1, query.shape[2:4])
    return (o[:, :, 0], None if lse is None else lse[:, 0]) if query.dim() == 3 else (o, lse)


def _join_heads(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Returns q, k and v as (batch, length, heads, head_dim). Where a group's heads share expanded keys, it is one key head."""
    if q.dim() == 3:
        return tuple(x[:, :, None] for x in (q, k, v))
    if q.dim() == 4:
        return q, k, v
    if all(x.stride(3) == 0 or x.shape[3] == 1 for x in (k, v)):
        return q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0]
    return tuple(x.flatten(2, 3) for x in (q, k, v))


def _dispatch(tensors: tuple[Any, ...], bias: Any, options: dict[str, Any]) -> Any:
    if bias is None:
        return attention.attention(*tensors, **options)
    name = type(bias).__name__
    if name in OPTIONS:
        options |= OPTIONS[name](bias)
        if "BlockDiagonal" not in name:
            return attention.attention(*tensors, **options)
        return _attend_packed(tensors, bias, options)
    if isinstance(bias, torch.Tensor):
        if not bias.is_floating_point():
            raise ProblemError(f"attn_bias is a tensor of {bias.dtype}; it must be of floats, which are added.")
        return attention.attention(*tensors, bias=_reshape_bias(bias), **options)
    raise UnsupportedError(f"attn_bias is a {name}; rawattn has these of xformers: tensors, {', '.join(OPTIONS)}.")


def _reshape_bias(bias: Any) -> Any:
    """Returns a tensor of biases as (batch, heads, q_len, kv_len)."""
    reading.check_plain("attn_bias", bias)
    if bias.dim() == 5:
        return bias.flatten(1, 2)
    return bias[:, None] if bias.dim() == 3 else bias


def _attend_packed(tensors: tuple[Any, ...], bias: Any, options: dict[str, Any]) -> Any:
    """Computes attention of sequences end to end, in a batch of one, whose lengths the bias has."""
    if any(len(x) != 1 for x in tensors):
        raise ProblemError(
            f"query has a batch of {len(tensors[0])} with a {type(bias).__name__}; it must be 1, sequences end to end."
        )
    (q, k, v), queries, keys = (x[0] for x in tensors), bias.q_seqinfo, bias.k_seqinfo
    lens = getattr(keys, "seqlen", None)  # of keys with padding behind them
    _check_gaps(bias)
    if hasattr(bias, "block_tables"):
        results = _attend_paged(q, k, v, bias, lens, options)
    else:
        longest = {"max_seqlen_q": queries.max_seqlen, "max_seqlen_kv": keys.max_seqlen}
        results = attention.attention_varlen(q, k, v, queries.seqstart, keys.seqstart, kv_lens=lens, **longest, **options)
    return tuple(x[None] for x in results) if "return_lse" in options else results[None]


def _check_gaps(bias: Any) -> None:
    """Raises UnsupportedError for keys that begin behind the first row, or that two sequences have in common."""
    starts, lens = (getattr(bias.k_seqinfo, name, None) for name in ("seqstart_py", "seqlen_py"))
    if not starts or lens is None:
        return
    name = f"attn_bias is a {type(bias).__name__} whose"
    if starts[0] != 0:
        raise UnsupportedError(f"{name} first sequence of keys begins at {starts[0]}; rawattn has those that begin at 0.")
    for i, (begin, end, n) in enumerate(zip(starts[:-1], starts[1:], lens, strict=True)):
        if n > end - begin:
            raise UnsupportedError(
                f"{name} sequence {i} has {n} keys in rows {begin} to {end}; rawattn has those that end before the next begin."
            )


def _attend_paged(q: Any, k: Any, v: Any, bias: Any, lens: Any, options: dict[str, Any]) -> Any:
    if options.get("dropout"):
        raise UnsupportedError(f"p is {options['dropout']} with a {type(bias).__name__}; caches have no dropout.")
    cache = serving.KVCache(*(x.unflatten(0, (-1, bias.page_size)) for x in (k, v)))
    longest = {"max_q_len": bias.q_seqinfo.max_seqlen, "max_kv_len": bias.block_tables.shape[1] * bias.page_size}
    step = serving.Step(lens, bias.block_tables, bias.q_seqinfo.seqstart, causal=options.pop("causal", False), **longest)
    return attention_kvcache(q, cache, step, **options)


NAMES = ("memory_efficient_attention", "memory_efficient_attention_forward", "memory_efficient_attention_partial")
_originals: dict[tuple[str, str], Any] = {}


def install() -> None:
    """Puts the functions in the place of xformers' own, in ``xformers.ops`` and ``xformers.ops.fmha``, in this process."""
    for path in ("xformers.ops", "xformers.ops.fmha"):
        module = importlib.import_module(path)
        for name in NAMES:
            if hasattr(module, name):
                _originals.setdefault((path, name), getattr(module, name))
                setattr(module, name, globals()[name])


def uninstall() -> None:
    """Takes back what ``install`` did."""
    for (path, name), function in _originals.items():
        setattr(sys.modules[path], name, function)
    _originals.clear()
