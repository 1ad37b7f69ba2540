"""Attention over packed sequences that are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..api import attention
from ..array.eager import eager
from ..errors import ProblemError
from ..mask import function
from ..operation import arguments
from ..operation.spec import Window, make_mask
from ..variant.mask import And, Causal, Full
from ..variant.mask import Window as WindowMask
from .context import context_attention
from .layout import check_layout, group_of


@eager
@arguments.named
def context_attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens: Any, group: Any = None, *, causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, sinks: Any = None, layout: str = "zigzag", method: str = "auto",
    return_lse: bool = False, deterministic: bool = True, cu_seqlens_kv: Any = None,
) -> Any:  # fmt: skip
    """``context_attention`` over sequences packed end to end: the rows of the whole pack are split, wherever sequences begin.

    >>> q, k, v = (rawattn.parallel.split(x, mesh["cp"], dim=0) for x in (q, k, v))  # (total, heads, head_dim)
    >>> o = rawattn.parallel.context_attention_varlen(q, k, v, cu_seqlens, mesh["cp"], causal=True)

    It is ``context_attention`` of one long sequence, under a mask that is a function: a query keeps keys of its own sequence. So
    all keys are sent, and kernels leave out the tiles of other sequences.

    Args:
        q: (total_q / n, heads, head_dim), this rank's rows.
        k, v: (total_kv / n, kv_heads, head_dim) and (total_kv / n, kv_heads, head_dim_v), this rank's rows.
        cu_seqlens: int32, (batch + 1,), the same on all ranks and on q's device: sequence i has rows cu_seqlens[i] to
            cu_seqlens[i + 1] of the whole pack. Rows past its last value are no sequence's, and no result of theirs is defined.
            On a GPU the values are not checked, since that would wait for the device.
        cu_seqlens_kv: cu_seqlens of the pack of k and v, where sequences have other numbers of keys than of queries. Without it
            cu_seqlens is that of both packs.
        causal, window: of each sequence, whose last query stands at its last key.
        The rest as in ``context_attention``. "contiguous" makes fewer calls than "zigzag".

    Returns:
        o, (total / n, heads, head_dim_v); with ``return_lse`` also lse, (heads, total / n). Autograd follows both.
    """
    check_layout(layout)
    group = group_of(group)
    starts_kv = cu_seqlens if cu_seqlens_kv is None else cu_seqlens_kv
    for name, x, rows_of in (("q", q, "q"), ("k", k, "q" if cu_seqlens_kv is None else "k"), ("v", v, "k")):
        if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.shape[0] != {"q": q, "k": k}[rows_of].shape[0]:
            words = f"of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            equality = "" if name == rows_of else f", with as many rows as {rows_of}"
            remedy = "; other lengths of keys need cu_seqlens_kv" if (name, rows_of) == ("k", "q") else ""
            raise ProblemError(f"{name} is {words}; it must be a torch tensor, (rows, heads, head_dim){equality}{remedy}.")
    count = dist.get_world_size(group)
    _check_starts("cu_seqlens", cu_seqlens, q, q.shape[0] * count)
    _check_starts("cu_seqlens_kv", starts_kv, q, k.shape[0] * count)
    if starts_kv.shape != cu_seqlens.shape:
        raise ProblemError(
            f"cu_seqlens_kv has {starts_kv.numel()} elements but cu_seqlens {cu_seqlens.numel()}; each has one more than there "
            "are sequences."
        )
    options: dict[str, Any] = {"softcap": softcap, "scale": scale, "sinks": sinks, "deterministic": deterministic}
    if count == 1:
        options |= {"causal": causal, "window": window, "return_lse": return_lse}
        with torch.autocast(q.device.type, enabled=False):
            return attention.attention_varlen(q, k, v, cu_seqlens, starts_kv, **options)
    kept = _make_mask((cu_seqlens, starts_kv), (q.shape[0] * count, k.shape[0] * count), make_mask(causal, window, None))
    mask = function(kept)
    options |= {"mask": mask, "layout": layout, "method": method}
    o, lse = context_attention(q[None], k[None], v[None], group, return_lse=True, **options)
    return (o[0], lse[0]) if return_lse else o[0]


def _check_starts(name: str, starts: Any, q: Any, rows: int) -> None:
    """Raises ProblemError where ``starts`` does not say where sequences begin in a pack of ``rows`` rows."""
    if not isinstance(starts, torch.Tensor) or (starts.dtype, starts.dim(), starts.device) != (torch.int32, 1, q.device):
        has_device = hasattr(starts, "device")
        words = f"{starts.dtype} of shape {tuple(starts.shape)} on {starts.device}" if has_device else repr(starts)
        raise ProblemError(f"{name} is {words}; it must be a torch tensor of int32, (batch + 1,), on {q.device}.")
    if starts.is_cpu and (starts.numel() == 0 or starts[0] != 0 or (starts.diff() < 0).any() or starts[-1] > rows):
        raise ProblemError(
            f"{name} is {starts.tolist()[:8]}; it must begin with 0, never fall, and end with at most {rows}, the rows of "
            "all ranks together."
        )


def _make_mask(starts: tuple[Any, Any], rows: tuple[int, int], mask: Any) -> Any:
    """Returns the mask by which a query keeps those keys of its own sequence that ``mask`` keeps. ``starts`` and ``rows`` are
    those of q's pack and of k's. In one pack distances are distances in the sequence; else a query counts from the key on which
    it stands."""
    q_ids, kv_ids = (_number_rows(*part) for part in zip(starts, rows, strict=True))
    live_kv_ids = torch.where(kv_ids < starts[1].shape[0] - 1, kv_ids, -1)  # behind the last sequence
    both = (mask.a, mask.b) if isinstance(mask, And) else (mask,)
    causal = any(isinstance(part, Causal) for part in both)
    left, right = next(((part.left, part.right) for part in both if isinstance(part, WindowMask)), (None, None))
    place = None
    if starts[0] is not starts[1] and not isinstance(mask, Full):
        ahead = torch.nn.functional.pad(starts[1][1:] - starts[0][1:], (0, 1))  # of queries behind the last sequence: any number
        place = torch.arange(rows[0], device=q_ids.device, dtype=torch.int32) + ahead[q_ids]

    def kept(b: Any, h: Any, q: Any, kv: Any) -> Any:
        is_kept = q_ids[q] == live_kv_ids[kv]
        at = q if place is None else place[q]
        if causal:
            is_kept = is_kept & (at >= kv)
        if left is not None:
            is_kept = is_kept & (at - kv <= left)
        return is_kept if right is None else is_kept & (kv - at <= right)

    return kept


def _number_rows(starts: Any, rows: int) -> Any:
    """Numbers rows by their sequence; rows behind the last sequence get the number of sequences."""
    at = torch.arange(rows, device=starts.device, dtype=torch.int32)
    return torch.searchsorted(starts[1:].contiguous(), at, right=True).int()
