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
    """Computes ``attention`` on q, k and v in the dtype that autocast has for this kind of device."""
    key = getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}")
    dtype = torch.get_autocast_dtype(kind)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return ATTENTION(*(x.to(dtype) if may_cast(x, kind) else x for x in (q, k, v)), *rest)


for _key in ("CPU", "CUDA"):
    library.impl("attention", functools.partial(_autocast, _key.lower()), f"Autocast{_key}")


def _vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Joins the mapped dimension to the batch, and repeats what is not mapped. With functions, which see the batch, with lists
    of keys, and with a seed for each element, computes one element after the other."""
    (q, k, v), rest, dims = args[:3], Rest(*args[3:]), Rest(*in_dims[3:])
    if functions.among(options_of(rest.spec)) or dims.seed is not None or rest.keys is not None:
        return _compute_one_by_one(ATTENTION, info.batch_size, in_dims, args), (0, 0)
    if q.dim() - (in_dims[0] is not None) == 3:
        raise ProblemError("attention_varlen was called under vmap; put the sequences into one packed call instead.")
    if dims.sinks is not None:
        raise ProblemError("sinks is mapped by vmap; it must be the same for every element of the batch.")
    first = [_join(x, dim, info.batch_size) for x, dim in zip((q, k, v), in_dims[:3], strict=True)]
    o, lse = ATTENTION(*first, *_join_lens(rest, dims, info.batch_size))
    return (o.unflatten(0, (info.batch_size, -1)), lse.unflatten(0, (info.batch_size, -1))), (0, 0)


def _join_lens(rest: Rest, dims: Rest, count: int) -> Rest:
    """Joins the mapped dimension of q_lens and kv_lens to the batch; the other arguments stay."""
    lens = _join(rest.q_lens, dims.q_lens, count), _join(rest.kv_lens, dims.kv_lens, count)
    return rest._replace(q_lens=lens[0], kv_lens=lens[1])


def _join(x: Any, dim: int | None, count: int) -> Any:
    """Joins the mapped dimension of ``x`` to its first one, and repeats ``x`` where none is mapped. None stays None."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _vmap_backward(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Joins the mapped dimension to the batch. With sinks, whose gradient is a sum over the batch, for varlen, which has no
    batch, for functions and lists of keys, which see it, and with a seed for each element, computes one element after the
    other."""
    count, rest, dims = info.batch_size, Rest(*args[7:]), Rest(*in_dims[7:])
    has_functions = bool(functions.among(options_of(rest.spec)))
    is_split = dims.seed is not None or has_functions or rest.keys is not None  # as the forward was
    if rest.seed is not None and rest.sinks is not None and not is_split:
        raise ProblemError(
            "dropout and sinks were given under vmap, whose gradients are computed one by one; leave out one of them."
        )
    if rest.sinks is not None or rest.cu_seqlens_q is not None or is_split:
        return _compute_one_by_one(BACKWARD, count, in_dims, args), (0,) * 4
    first = [_join(x, dim, count) for x, dim in zip(args[:7], in_dims[:7], strict=True)]
    if len(first) == 7:
        first += _join_lens(rest, dims, count)
    *gradients, dsinks = BACKWARD(*first)
    return (*(x.unflatten(0, (count, -1)) for x in gradients), dsinks.expand(count, 0)), (0,) * 4


def _vmap_captured(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[list[Any], list[int]]:
    """Computes one element after the other: a captured tensor is the same for all, or has gradients of its own for each."""
    gradients = _compute_one_by_one(CAPTURED, info.batch_size, in_dims, args)
    return [*gradients], [0] * len(gradients)


def _compute_one_by_one(operator: Any, count: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Computes one element of the mapped dimension after the other."""
    elements = [[_take_element(x, dim, i) for x, dim in zip(args, in_dims, strict=True)] for i in range(count)]
    return tuple(map(torch.stack, zip(*(operator(*args_) for args_ in elements), strict=True)))


def _take_element(x: Any, dim: Any, i: int) -> Any:
    """Takes an element of an argument, or of the tensors of a list."""
    if isinstance(x, (list, tuple)):
        return [_take_element(y, y_dim, i) for y, y_dim in zip(x, dim or [None] * len(x), strict=True)]
    return x if dim is None else x.select(dim, i)


if hasattr(torch.library, "register_vmap"):  # torch 2.5
    torch.library.register_vmap("rawattn::attention", _vmap, lib=library)
    torch.library.register_vmap("rawattn::attention_backward", _vmap_backward, lib=library)
    torch.library.register_vmap("rawattn::attention_backward_captured", _vmap_captured, lib=library)


@torch.utils.flop_counter.register_flop_formula(torch.ops.rawattn.attention)
def _count_flops(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
    """Counts ``Forward.flops`` of these shapes: of both products, over the pairs that the mask keeps. For its own attention torch
    counts all pairs."""
    return 2 * (q[-1] + v[-1]) * _count_pairs(q, k, v, *rest, **named)


@torch.utils.flop_counter.register_flop_formula(
    [torch.ops.rawattn.attention_backward, torch.ops.rawattn.attention_backward_captured]
)
def _count_flops_backward(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any = None, *rest: Any, **named: Any) -> Any:
    """Counts three products of q's head_dim, of which one repeats the forward's, and two of v's, as ``_count_flops`` does."""
    return 2 * (3 * q[-1] + 2 * v[-1]) * _count_pairs(q, k, v, *rest, **named)


def _count_pairs(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> Any:
    """Counts the (query, key) pairs of all batches and heads of these shapes that the mask keeps, as if all rows were in use. A
    mask that is a function counts as if it kept all pairs."""
    args = Rest(*rest, **{name: x for name, x in named.items() if name in Rest._fields})
    starts, varlen = args.cu_seqlens_q, args.cu_seqlens_q is not None
    if not all(isinstance(n, int) for shape in (q, k, v) for n in shape):  # symbolic: a sum over queries would fix the length
        return q[-2] * (q[-3] * k[-3] if varlen else q[0] * q[1] * k[1])
    batch, total_q, total_kv = (starts[0] - 1, q[0], k[0]) if varlen else (q[0], -1, -1)
    sizes = batch, q[-3], k[-3], q[-2], k[-2], q[-1], v[-1]
    op = Forward(ELEMENTS["fp32"], *sizes, Spec.of(**functions.without(options_of(args.spec))), varlen, total_q, total_kv)
    return op.batch * op.heads * op.pairs
