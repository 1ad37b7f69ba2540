"""Rules of the operators for autocast, vmap and the count of floating-point operations."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.flop_counter

from ..errors import ProblemError
from ..operation import Forward, functions
from ..operation.spec import Spec
from ..variant.element import ELEMENTS
from .modes import may_cast
from .operators import ATTENTION, BACKWARD, CAPTURED, Rest, library
from .option_text import options_of


def _autocast(kind: str, q: Any, k: Any, v: Any, *rest: Any) -> tuple[Any, Any]:
    key = getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}")
    dtype = torch.get_autocast_dtype(kind)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return ATTENTION(*(x.to(dtype) if may_cast(x, kind) else x for x in (q, k, v)), *rest)


for _key in ("CPU", "CUDA"):
    library.impl("attention", functools.partial(_autocast, _key.lower()), f"Autocast{_key}")


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Joins the mapped dimension to the batch, and repeats what is not mapped. With functions, which see the batch, and with a
    seed for each element, computes one element after the other."""
    (q, k, v), rest, dims = args[:3], Rest(*args[3:]), Rest(*in_dims[3:])
    if functions.among(options_of(rest.spec)) or dims.seed is not None:
        return _one_by_one(ATTENTION, info.batch_size, in_dims, args), (0, 0)
    if q.dim() - (in_dims[0] is not None) == 3:
        raise ProblemError("attention_varlen was called under vmap; put the sequences into one packed call instead.")
    if dims.sinks is not None:
        raise ProblemError("sinks is mapped by vmap; it must be the same for every element of the batch.")
    first = [_joined(x, dim, info.batch_size) for x, dim in zip((q, k, v), in_dims[:3], strict=True)]
    o, lse = ATTENTION(*first, *_joined_lens(rest, dims, info.batch_size))
    return (o.unflatten(0, (info.batch_size, -1)), lse.unflatten(0, (info.batch_size, -1))), (0, 0)


def _joined_lens(rest: Rest, dims: Rest, count: int) -> Rest:
    """The arguments with the mapped dimension of q_lens and kv_lens joined to the batch."""
    lens = _joined(rest.q_lens, dims.q_lens, count), _joined(rest.kv_lens, dims.kv_lens, count)
    return rest._replace(q_lens=lens[0], kv_lens=lens[1])


def _joined(x: Any, dim: int | None, count: int) -> Any:
    """Joins a mapped dimension to the first one; where there is none, repeats. None stays None."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Joins the mapped dimension to the batch. With sinks, whose gradient is a sum over the batch, for varlen, which has no
    batch, for functions, which see it, and with a seed for each element, computes one element after the other."""
    count, rest, dims = info.batch_size, Rest(*args[7:]), Rest(*in_dims[7:])
    is_split = dims.seed is not None or bool(functions.among(options_of(rest.spec)))  # as the forward was
    if rest.seed is not None and rest.sinks is not None and not is_split:
        raise ProblemError(
            "dropout and sinks were given under vmap, whose gradients are computed one by one; leave out one of them."
        )
    if rest.sinks is not None or rest.cu_seqlens_q is not None or is_split:
        return _one_by_one(BACKWARD, count, in_dims, args), (0,) * 4
    first = [_joined(x, dim, count) for x, dim in zip(args[:7], in_dims[:7], strict=True)]
    if len(first) == 7:
        first += _joined_lens(rest, dims, count)
    *found, dsinks = BACKWARD(*first)
    return (*(x.unflatten(0, (count, -1)) for x in found), dsinks.expand(count, 0)), (0,) * 4


def _vmap_captured(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Any], list[int]]:
    """Computes one element after the other: a captured tensor is the same for all, or has gradients of its own for each."""
    found = _one_by_one(CAPTURED, info.batch_size, in_dims, args)
    return [*found], [0] * len(found)


def _one_by_one(operator: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Computes one element of the mapped dimension after the other."""
    each = [[_element(x, dim, i) for x, dim in zip(args, in_dims, strict=True)] for i in range(count)]
    return tuple(map(torch.stack, zip(*(operator(*some) for some in each), strict=True)))


def _element(x: Any, dim: Any, i: int) -> Any:
    """Takes an element of an argument, or of the tensors of a list."""
    if isinstance(x, (list, tuple)):
        return [_element(y, each, i) for y, each in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, i)


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    torch.library.register_vmap("rawattn::attention", _vmap, lib=library)
    torch.library.register_vmap("rawattn::attention_backward", _vmap_backward, lib=library)
    torch.library.register_vmap("rawattn::attention_backward_captured", _vmap_captured, lib=library)


@torch.utils.flop_counter.register_flop_formula(torch.ops.rawattn.attention)
def _flops(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
    """Counts ``Forward.flops`` of these shapes: both products over the pairs that the mask keeps. torch counts whole squares for
    its own attention."""
    return 2 * (q[-1] + v[-1]) * _pairs(q, k, v, *rest, **named)


@torch.utils.flop_counter.register_flop_formula(
    [torch.ops.rawattn.attention_backward, torch.ops.rawattn.attention_backward_captured]
)
def _flops_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *rest: Any, **named: Any) -> Any:
    """Counts as ``_flops``: three products of q's head_dim, of which one is the forward's again, and two of v's."""
    return 2 * (3 * q[-1] + 2 * v[-1]) * _pairs(q, k, v, *rest, **named)


def _pairs(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
    """Counts (query, key) pairs that the mask keeps, of all batches and heads of these shapes, as if all rows were in use; all
    pairs of a function."""
    args = Rest(*rest, **{name: x for name, x in named.items() if name in Rest._fields})
    starts, varlen = args.cu_seqlens_q, args.cu_seqlens_q is not None
    if not all(isinstance(n, int) for shape in (q, k, v) for n in shape):  # symbolic: a sum over queries would fix the length
        return q[-2] * (q[-3] * k[-3] if varlen else q[0] * q[1] * k[1])
    batch, total_q, total_kv = (starts[0] - 1, q[0], k[0]) if varlen else (q[0], -1, -1)
    sizes = batch, q[-3], k[-3], q[-2], k[-2], q[-1], v[-1]
    op = Forward(ELEMENTS["fp32"], *sizes, Spec.of(**functions.without(options_of(args.spec))), varlen, total_q, total_kv)
    return op.batch * op.heads * op.pairs
