"""Attention whose heads are split over ranks, of sequences that are split over them before and after."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..api import attention
from ..array.eager import eager
from ..errors import ProblemError
from ..operation import arguments, captures, functions
from ..operation.spec import MaskLike, ScoreLike, Spec, Window
from ..variant.score import Scale, Softcap
from .context import bind_captured, check_tensors, resolve_parts
from .layout import check_layout, group_of


@eager
@arguments.named
def head_attention(
    q: Any, k: Any, v: Any, group: Any = None, *, causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None,
    alibi: Any = None, bias: Any = None, sinks: Any = None, layout: str = "zigzag", return_lse: bool = False,
    deterministic: bool = True,
) -> Any:  # fmt: skip
    """``context_attention`` by another method: all ranks exchange rows for heads, each computes whole sequences of its heads, and
    they exchange back.

    >>> o = rawattn.parallel.head_attention(q, k, v, mesh["cp"], causal=True, layout="contiguous")

    It sends q, k, v and o once, whatever the number n of ranks, and waits for that; the work is the same on all ranks under any
    mask and layout. The arguments, results and rules are those of ``context_attention``, and:

    Args:
        q: heads is a multiple of n.
        k, v: kv_heads is a multiple of n, or divides it; then each head goes to several ranks.
        mask, score: Python functions, and options that treat all heads alike. The gradient of an array that a score captured is
            that of this rank's heads, and of all queries.
        layout: "contiguous" costs a copy less than "zigzag".

    The same bits come from any number of ranks. The method is that of DeepSpeed Ulysses (arXiv 2309.14509).
    """
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score,
        "return_lse": return_lse, "deterministic": deterministic,
    }  # fmt: skip
    group, (taken, captured) = group_of(group), captures.take(options)
    captures.find_followed(taken, captured)  # raises where a mask captured a tensor that requires grad
    Spec.of(**functions.without(taken))
    check_layout(layout)
    check_tensors(q, k, v, sinks, layout)
    count = dist.get_world_size(group)
    with torch.autocast(q.device.type, enabled=False):
        if count == 1:
            return attention.attention(q, k, v, sinks=sinks, **options)
        return _split_heads(q, k, v, sinks, group, taken, captured, options, layout)


def _split_heads(
    q: Any, k: Any, v: Any, sinks: Any, group: Any, taken: dict[str, Any], captured: tuple[Any, ...], options: dict[str, Any],
    layout: str,
) -> Any:  # fmt: skip
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    heads = q.shape[2] // count
    spec, parts = resolve_parts(q, k, v, taken, captured, count, h=rank * heads)
    _check_heads(q, k, spec, count)
    options |= {role: getattr(spec, role) for role, _ in functions.among(taken)} | bind_captured(parts, captured)
    if k.shape[2] % count:
        k, v = (x.repeat_interleave(count // x.shape[2], dim=2) for x in (k, v))
    widths = [x.shape[2] // count * x.shape[3] for x in (q, k, v)]
    if q.shape[1] == k.shape[1]:  # one exchange of all three
        joined = torch.cat([_split_columns(x, count) for x in (q, k, v)], -1)
        rows = _join_rows(_exchange(joined, group), layout).split(widths, -1)
    else:
        rows = tuple(_join_rows(_exchange(_split_columns(x, count), group), layout) for x in (q, k, v))
    rank_tensors = (x.unflatten(-1, (-1, tensor.shape[3])) for x, tensor in zip(rows, (q, k, v), strict=True))
    rank_sinks = None if sinks is None else sinks[rank * heads : (rank + 1) * heads]
    o, *lse = attention.attention(*rank_tensors, sinks=rank_sinks, **{**options, "return_lse": True})
    o = _send_back(o.flatten(2), group, layout).unflatten(-1, (-1, v.shape[3]))
    if not options["return_lse"]:
        return o
    return o, _send_back(lse[0].transpose(1, 2), group, layout).transpose(1, 2).contiguous()


def _check_heads(q: Any, k: Any, spec: Spec, count: int) -> None:
    """Raises ProblemError where the heads of q and k cannot be split over ``count`` ranks."""
    if q.shape[2] % count:
        raise ProblemError(f"q has {q.shape[2]} heads; it must be a multiple of the {count} ranks.")
    if k.shape[2] % count and count % k.shape[2]:
        raise ProblemError(f"k has {k.shape[2]} heads; it must be a multiple or a divisor of the {count} ranks.")
    by_head = type(spec.score) not in (Scale, Softcap) and not spec.score.is_function
    if by_head or spec.mask.of_head is not None:
        name = "score" if by_head else "mask"
        raise ProblemError(f"{name} may treat heads differently, and a rank numbers its own from 0 on; call context_attention.")


class _Exchange(torch.autograd.Function):
    """An exchange of equal parts along the first dimension; its gradient is the same exchange of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        """Gives part i of x to rank i."""
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        """Gives the gradient of each part to the rank that the part came from."""
        return _Exchange.apply(gradient, ctx.group), None


def _exchange(x: Any, group: Any) -> Any:
    return _Exchange.apply(x, group)


def _split_columns(x: Any, count: int) -> Any:
    """Returns x, (batch, rows, heads, columns), as (ranks, batch, rows, a rank's heads and columns)."""
    return x.unflatten(2, (count, -1)).flatten(3).movedim(2, 0)


def _join_rows(x: Any, layout: str) -> Any:
    """Returns x, (ranks, batch, rows, columns), as (batch, all rows in the order of their positions, columns)."""
    if layout == "contiguous":
        return x.movedim(0, 1).flatten(1, 2)
    half = x.shape[2] // 2
    first, second = x[:, :, :half], x[:, :, half:].flip(0)
    return torch.cat([first, second]).movedim(0, 1).flatten(1, 2)


def _send_back(x: Any, group: Any, layout: str) -> Any:
    """Sends x, (batch, all rows, a rank's columns), back to the ranks of its rows: as (batch, a rank's rows, all columns)."""
    count = dist.get_world_size(group)
    parts = x.unflatten(1, (count if layout == "contiguous" else 2 * count, -1)).movedim(1, 0)
    if layout == "zigzag":
        parts = torch.cat([parts[:count], parts[count:].flip(0)], dim=2)
    return _exchange(parts, group).movedim(0, 2).flatten(2)
