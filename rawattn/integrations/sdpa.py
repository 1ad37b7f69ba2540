"""torch's ``scaled_dot_product_attention``, computed by rawattn: as a function, or below torch's own.

>>> from rawattn.integrations import sdpa
>>> o = sdpa.scaled_dot_product_attention(query, key, value, is_causal=True)  # (batch, heads, length, head_dim)
>>> sdpa.register()
>>> torch.nn.attention.activate_flash_attention_impl("RAWATTN")  # F.scaled_dot_product_attention, where it takes flash
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from .. import mask, score
from ..api import attention
from ..api.naming import naming
from ..array import reading
from ..errors import ProblemError, UnsupportedError
from ..torch import dispatch, seed_of

NAME = "RAWATTN"
_CAUSAL = mask.Causal("top_left")


class CallError(ProblemError, RuntimeError):
    """A wrong call of ``scaled_dot_product_attention``: torch's own raises RuntimeError, on which callers fall back."""


@naming(CallError, q="query", k="key", v="value", bias="attn_mask", dropout="dropout_p")
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Computes what ``torch.nn.functional.scaled_dot_product_attention`` does, for tensors (batch, heads, length, head_dim), of
    fewer or more dimensions before length, or nested.

    Nothing is copied except results of strided nested tensors. ``is_causal`` begins at the first key (top left). A query that
    keeps no key gives 0. The result has the order of query's dimensions in memory; where autograd follows the call, or torch
    traces it, that of (batch, length, heads, head_dim).

    ``attn_mask`` is read where it lies, or is a ``CausalBias``; a float one may need gradients. While ``torch.compile`` traces it
    must be float: a bool one is refused.

    Dropout follows torch's generator of the device, with other numbers than torch's own draws.

    Raises UnsupportedError where no kernel computes the call, CallError, a ProblemError, for a wrong argument: both are
    RuntimeErrors.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ProblemError(f"{name} is a {type(x).__name__}; it must be a torch tensor.")
    if query.is_nested or key.is_nested or value.is_nested:
        return _attend_nested((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
    shape, k_shape, v_shape, lead = query.shape, key.shape, value.shape, None
    if not (
        len(shape) == len(k_shape) == len(v_shape) == 4 and shape[0] == k_shape[0] == v_shape[0]
        and k_shape[1] == v_shape[1] and (enable_gqa or shape[1] == k_shape[1])
    ):  # fmt: skip
        *tensors, lead = _broadcast((query, key, value), enable_gqa)
        dims, (query, key, value) = max(map(len, (shape, k_shape, v_shape))), tensors
        if len(lead) > 1 and isinstance(attn_mask, torch.Tensor) and attn_mask.dim() > 3:
            reading.check_plain("attn_mask", attn_mask)
            attn_mask = _join_batch("attn_mask", attn_mask, lead)
        shape, k_shape = query.shape, key.shape
    options = read_mask(attn_mask, is_causal, (*shape[:3], k_shape[2]))
    options["scale"] = scale
    if dropout_p != 0.0:
        options["dropout"] = dropout_p
    o = attend(query, key, value, options)[0]
    if lead is None or dims == 4:
        return o
    return o.unflatten(0, lead) if dims > 4 else o[(0,) * (4 - dims)]


def _broadcast(tensors: tuple[Any, ...], enable_gqa: bool) -> tuple[Any, ...]:
    """Broadcasts query, key and value as torch does. Returns views, (batch, heads, length, head_dim), and the batch's shape."""
    if any(x.dim() < 2 for x in tensors):
        raise ProblemError(f"the inputs have the shapes {_write_shapes(tensors)}; they must have 2 dimensions or more.")
    tensors = tuple(x[(None,) * (4 - x.dim())] for x in tensors)
    heads, k_heads, v_heads = (x.shape[-3] for x in tensors)
    kv_heads = max(k_heads, v_heads)
    if min(k_heads, v_heads) not in (1, kv_heads):
        raise UnsupportedError(
            f"key has {k_heads} heads but value {v_heads}; give as many of both, or one of one: others would be copied."
        )
    if heads != 1 != kv_heads:
        check_heads(heads, kv_heads, enable_gqa)
    heads = kv_heads if heads == 1 and not enable_gqa else heads
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
    except RuntimeError:
        shapes = _write_shapes(tensors)
        raise ProblemError(f"the inputs have the shapes {shapes}; their batches must be the same, or 1.") from None
    named = zip(("query", "key", "value"), tensors, (heads, kv_heads, kv_heads), strict=True)
    return *(_join_batch(name, x.expand(*x.shape[:-3], n, *x.shape[-2:]), lead) for name, x, n in named), lead


def _write_shapes(tensors: tuple[Any, ...]) -> str:
    return ", ".join(str(tuple(x.shape)) for x in tensors)


def _join_batch(name: str, x: Any, lead: tuple[int, ...]) -> Any:
    """Returns a view of ``x`` with one dimension for the batch, whose shape broadcasts to ``lead``."""
    try:
        return x.expand(*lead, *x.shape[-3:]).view(math.prod(lead), *x.shape[-3:])
    except RuntimeError:
        raise UnsupportedError(
            f"{name} has the shape {tuple(x.shape)} and strides {tuple(x.stride())}; its batch must be one dimension in memory, "
            f"of {tuple(lead)}, as nothing is copied."
        ) from None


def _attend_nested(
    tensors: tuple[Any, ...], attn_mask: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Computes o of nested tensors: of jagged ones as packed sequences, of strided ones one sequence after the other."""
    if attn_mask is not None:
        raise ProblemError("attn_mask was given beside nested tensors; torch has none there: leave it out, or give is_causal.")
    if any(not x.is_nested or x.layout is not tensors[0].layout or x.dim() != tensors[0].dim() for x in tensors):
        raise ProblemError("query, key and value must all be nested, of one layout and with as many dimensions, or none of them.")
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if tensors[0].layout is torch.strided:
        warnings.warn(
            "strided nested tensors: a call for each sequence, and o is copied; jagged ones need neither.", stacklevel=4
        )
        sequences = zip(*(x.unbind() for x in tensors), strict=True)
        return torch.nested.as_nested_tensor([scaled_dot_product_attention(*x, **options) for x in sequences])
    ragged = [x._ragged_idx for x in tensors]
    if any(x.lengths() is not None for x in tensors):
        raise UnsupportedError("a nested tensor has rows between its sequences; give x.contiguous(), or sequences end to end.")
    if tensors[0].dim() > 3 and ragged == [1, 1, 1]:  # lengths are the same, and batches are not
        o = scaled_dot_product_attention(*(x.values() for x in tensors), **options)
        return torch.nested.nested_tensor_from_jagged(o, tensors[0].offsets())
    if tensors[0].dim() != 4 or ragged != [2, 2, 2]:
        raise UnsupportedError(
            f"query is a nested tensor of {tensors[0].dim()} dimensions, ragged in {ragged[0]}; it must have 4, (batch, heads, "
            "length, head_dim), ragged in length, 2, and key and value likewise."
        )
    check_heads(tensors[0].shape[1], tensors[1].shape[1], enable_gqa)
    starts = [x.offsets().to(torch.int32) for x in tensors[:2]]
    longest = [getattr(x, "_maybe_max_seqlen", None) for x in tensors[:2]]
    packed = (x.transpose(1, 2).values() for x in tensors)
    o = attention.attention_varlen(
        *packed, *starts, *longest, scale=scale, dropout=dropout_p, mask=_CAUSAL if is_causal else None
    )
    return torch.nested.nested_tensor_from_jagged(o, tensors[0].offsets()).transpose(1, 2)


def attend(query: Any, key: Any, value: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Computes o and lse by ``rawattn.attention`` of tensors (batch, heads, length, head_dim); lse is None where it is not asked
    for. o is such a tensor, with the order of query's dimensions in memory where that is possible."""
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    batches, heads, rows, _ = query.stride()
    out = None
    if not 0 < heads <= rows <= batches and dispatch((q, k, v)) is None:
        if "score" in options:
            options["score"] = score.function(options["score"])
        more = (*getattr(options.get("score"), "arrays", ()), *([options["bias"]] if "bias" in options else []))
        if not more or dispatch((q, *more)) is None:  # autograd follows these, too
            out = _make_like(query, v.shape[-1])
            options["out"] = out.transpose(1, 2)
    results = attention.attention(q, k, v, **options)
    o, lse = results if options.get("return_lse") else (results, None)
    return (o.transpose(1, 2) if out is None else out), lse


def _make_like(query: Any, head_dim: int) -> Any:
    """Makes a tensor of query's shape except for head_dim, with the order of query's dimensions in memory."""
    if head_dim == query.shape[-1]:
        return torch.empty_like(query)
    order = sorted(range(3), key=query.stride().__getitem__, reverse=True)
    tensor = query.new_empty([*(query.shape[i] for i in order), head_dim])
    return tensor.permute(*map(order.index, range(3)), 3)


def check_heads(heads: int, kv_heads: int, enable_gqa: bool) -> None:
    """Raises ProblemError where heads would share keys without ``enable_gqa``."""
    if not enable_gqa and heads != kv_heads:
        words = f"query has {heads} heads but key has {kv_heads}"
        raise ProblemError(f"{words}; they must be the same without enable_gqa=True.")


def read_mask(attn_mask: Any, is_causal: bool, shape: tuple[int, ...], name: str = "attn_mask") -> dict[str, Any]:
    """Reads attn_mask and is_causal as options of ``rawattn.attention``. ``shape`` is (batch, heads, q_len, kv_len), and ``name``
    is what errors call attn_mask."""
    if attn_mask is None:
        if is_causal and shape[2] == shape[3] and not torch.compiler.is_compiling():
            return {"causal": True}  # the same, and found faster
        return {"mask": _CAUSAL} if is_causal else {}
    if is_causal:
        raise ProblemError("attn_mask was given beside is_causal=True; give one of them.")
    if isinstance(attn_mask, CausalBias):
        lengths = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if lengths != tuple(shape[2:]):
            raise ProblemError(f"{name} is a CausalBias of {lengths} queries and keys; it must be of {tuple(shape[2:])}.")
        return {"causal": True} if attn_mask.variant == CausalVariant.LOWER_RIGHT else read_mask(None, True, shape)
    _check_mask(attn_mask, shape, name)
    if attn_mask.dtype is torch.bool and torch.compiler.is_dynamo_compiling():
        raise UnsupportedError(
            "attn_mask is bool where torch traces; give a float one, 0 and -inf, or options of rawattn.attention."
        )
    attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if attn_mask.stride(-1) == 0 and not attn_mask.requires_grad:  # expanded over keys
        attn_mask = attn_mask[..., :1]
    if attn_mask.dtype is not torch.bool:
        return {"bias": attn_mask}
    b, h, q, kv = (size > 1 for size in attn_mask.shape)  # of the others all indices are 0

    def entry(batch: Any, head: Any, row: Any, column: Any) -> Any:
        return attn_mask[batch if b else 0, head if h else 0, row if q else 0, column if kv else 0]

    return {"mask": mask.function(entry)}


def _check_mask(attn_mask: Any, shape: tuple[int, ...], name: str) -> None:
    """Raises ProblemError for a mask that torch's own attention does not take."""
    if not isinstance(attn_mask, torch.Tensor):
        raise ProblemError(f"{name} is a {type(attn_mask).__name__}; it must be a torch tensor.")
    reading.check_plain(name, attn_mask)
    if attn_mask.dtype is not torch.bool and not attn_mask.is_floating_point():
        raise ProblemError(f"{name} is {attn_mask.dtype}; it must be bool, True where a key counts, or of floats that are added.")
    if attn_mask.dim() > 4:
        raise ProblemError(f"{name} has {attn_mask.dim()} dimensions; it must have up to 4, (batch, heads, q_len, kv_len).")
    if any(n not in (1, of) for n, of in zip(attn_mask.shape, shape[4 - attn_mask.dim() :], strict=True)):
        raise ProblemError(
            f"{name} has the shape {tuple(attn_mask.shape)}; it must broadcast to (batch, heads, q_len, kv_len), {tuple(shape)}."
        )


# ---- below torch's own


def register(name: str = NAME) -> None:
    """Registers rawattn as an implementation of flash attention in torch, which then says when it is used:
    ``torch.nn.attention.activate_flash_attention_impl(name)``, and ``restore_flash_attention_impl()`` for the end.

    What torch computes by flash attention then comes from rawattn, in the whole process: ``F.scaled_dot_product_attention`` where
    torch's own rules choose flash, and ``torch.nn.attention.varlen``. Autograd above stays torch's.
    Raises UnsupportedError where torch has no such registry; 2.13 has it.
    """
    add = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if add is None:
        raise UnsupportedError(
            f"torch {torch.__version__} has no register_flash_attention_impl; call rawattn.integrations.sdpa's "
            "scaled_dot_product_attention, or take torch 2.13."
        )
    add(name, register_fn=Registration)


class Registration:
    """rawattn's functions in place of torch's, for tensors of a dispatch key, until ``remove``."""

    def __init__(self, key: str = "CUDA") -> None:
        self.library: Any = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():  # torch says that kernels are overridden, which was asked for
            warnings.simplefilter("ignore")
            for name, function in KERNELS.items():
                self.library.impl(name, function, key)

    def remove(self) -> None:
        """Gives torch its own functions back."""
        self.library = None


def _flash_attention_forward(
    query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Computes torch's operator of this name: dense, or packed where cum_seq_q is given."""
    starts, rest = (cum_seq_q, cum_seq_k, max_q, max_k), _make_rest(query, dropout_p)
    o, lse = _compute_forward(query, key, value, starts, (dropout_p, rest[0]), is_causal, return_debug_mask, None, **more)
    return (o, lse, *rest)


def _flash_attention_forward_no_dropout_inplace(
    out: Any, query: Any, key: Any, value: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, **more: Any,
) -> Any:  # fmt: skip
    """Computes torch's operator of this name, into out."""
    starts = (cum_seq_q, cum_seq_k, max_q, max_k)
    return _compute_forward(query, key, value, starts, (dropout_p, None), is_causal, return_debug_mask, out, **more)[1]


def _flash_attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, rng_state: Any, unused: Any, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Computes torch's operator of this name."""
    tensors, starts = (grad_out, query, key, value, out, logsumexp), (cum_seq_q, cum_seq_k, max_q, max_k)
    options = {"causal": is_causal, "window": (window_size_left, window_size_right), "scale": scale}
    options |= _read_dropout(dropout_p, rng_state)
    return _compute_gradients(tensors, starts, options, tuple(map(torch.empty_like, (query, key, value))))


def _compute_gradients(
    tensors: tuple[Any, ...], starts: tuple[Any, ...], options: dict[str, Any], out: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Computes dq, dk and dv into ``out``, as torch's compiler expects gradients to have their inputs' strides."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    options |= {} if starts[0] is None else dict(zip(names, starts, strict=True))
    do, q, k, v, o, lse = tensors
    with torch.no_grad():
        return tuple(attention.attention_backward(do, q, k, v, o, lse.contiguous(), out=out, **options))


def _compute_forward(
    query: Any, key: Any, value: Any, starts: tuple[Any, ...], dropout: tuple[float, Any], is_causal: bool, debug: bool,
    out: Any, *, scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Any = None, alibi_slopes: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    """Computes o and lse; ``dropout`` is its probability and state. num_splits is a hint, and ignored."""
    refused = {"return_debug_mask": debug or None, "alibi_slopes": alibi_slopes, "block_table": block_table}
    for name, argument in refused.items():
        if argument is not None:
            raise UnsupportedError(f"{name} was given; rawattn does not have it below torch's attention.")
    options = {"causal": is_causal, "window": (window_size_left, window_size_right), "scale": scale, "kv_lens": seqused_k}
    options |= _read_dropout(*dropout)
    with torch.no_grad():  # autograd is above
        if starts[0] is None:
            return attention.attention(query, key, value, return_lse=True, out=out, **options)
        return attention.attention_varlen(query, key, value, *starts, return_lse=True, out=out, **options)


def _read_dropout(p: float, state: Any) -> dict[str, Any]:
    """Reads a probability and a state of random numbers, whose first number is the seed, as options."""
    if p and state is None:
        raise UnsupportedError(f"dropout_p is {p} in torch's operator without dropout; give 0.0.")
    return {"dropout": p, "seed": state.view(torch.int64)[:1]} if p else {}


def _make_rest(query: Any, dropout_p: float) -> tuple[Any, ...]:
    """Makes the results of torch's operators behind o and lse: the state of random numbers, an unused tensor, and an empty mask
    for debugging. With dropout the state begins with a seed from torch's generator."""
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    if dropout_p:
        state.view(torch.int64)[:1] = seed_of(query, None)
    return state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _scaled_dot_product_flash_attention(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Computes torch's operator of this name on (batch, heads, length, head_dim); o has query's strides."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    starts = (None, None, q.shape[1], k.shape[1])
    rest, out = _make_rest(query, dropout_p), torch.empty_like(query).transpose(1, 2)
    o, lse = _compute_forward(q, k, v, starts, (dropout_p, rest[0]), is_causal, return_debug_mask, out, scale=scale)
    return (o.transpose(1, 2), lse, None, None, q.shape[1], k.shape[1], *rest)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any, cum_seq_k: Any, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Computes torch's operator of this name."""
    tensors = tuple(x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    options = {"causal": is_causal, "scale": scale} | _read_dropout(dropout_p, philox_seed)
    dq, dk, dv = (torch.empty_like(x).transpose(1, 2) for x in (query, key, value))
    gradients = _compute_gradients((*tensors, logsumexp), (None,) * 4, options, (dq, dk, dv))
    return tuple(x.transpose(1, 2) for x in gradients)


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        _flash_attention_forward, _flash_attention_forward_no_dropout_inplace, _flash_attention_backward,
        _scaled_dot_product_flash_attention, _scaled_dot_product_flash_attention_backward,
    )
}  # fmt: skip
