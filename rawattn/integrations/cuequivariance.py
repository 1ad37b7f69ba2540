"""cuEquivariance's ``triangle_attention``, with its signature, computed by rawattn.

>>> from rawattn.integrations.cuequivariance import triangle_attention
>>> o = triangle_attention(q, k, v, bias, mask)

A bias of pairs is read where it lies, in its own format, and is not expanded over the rows that share it. Its gradient is summed
over these in one order, so that it always has the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..api import attention
from ..api.pairs import pair_options
from ..errors import ProblemError


@torch.compiler.disable  # masks and biases of a batch become functions, which no graph holds
def triangle_attention(
    q: Any, k: Any, v: Any, bias: Any, mask: Any = None, scale: float | None = None, return_aux: bool = False
) -> Any:  # fmt: skip
    """softmax(scale q k^T + bias) v for each of N rows, which share the bias.

    Args:
        q: (..., N, heads, S, head_dim), bf16, fp16, fp32 or fp64. k, v: (..., N, heads, S_k, head_dim). Of four dimensions one is
            added in front, as cuEquivariance does. Copied where the leading dimensions do not lie one behind the other, or the
            last not side by side.
        bias: (..., 1, heads, S, S_k), a float of any format, likewise. It has a gradient in its own format.
        mask: (..., N, 1, 1, S_k) of bools: whether a key is kept; None for all. N may be 1. A query whose row keeps no key gives
            0, and so do its gradients; cuEquivariance gives the mean of all values.
        scale: None for 1 / sqrt(head_dim).
        return_aux: give (o, lse, max), in float32 (float64 for fp64): of each query's logits the logarithm of the sum of
            exponentials, and the largest, both (..., N, heads, S) and without a gradient. No kernel keeps the largest: torch
            computes it anew.

    Returns o, (..., N, heads, S, head_dim); the heads of a query lie side by side, so ``o.transpose(-2, -3).flatten(-2)`` copies
    nothing. Raises ProblemError where shapes contradict each other.
    """
    q, k, v = (x[None] if x.dim() == 4 else x for x in (q, k, v))
    bias, mask = (x[None] if x is not None and x.dim() == 4 else x for x in (bias, mask))
    check_shapes(q, k, v, bias, mask)
    rows = [join(x.transpose(-2, -3), -4) for x in (q, k, v)]
    pairs, keep = join(bias.squeeze(-4), -4), None if mask is None else join_rows(mask, q.shape[:-3])
    options = pair_options(pairs, q.shape[-4], keep=keep)
    o, lse = attention.attention(*rows, scale=scale, return_lse=True, **options)
    o = o.unflatten(0, q.shape[:-3]).transpose(-2, -3)
    if not return_aux:
        return o
    largest = _find_largest(rows, pairs, keep, scale)
    return o, *(x.detach().unflatten(0, q.shape[:-3]) for x in (lse, largest))


def check_shapes(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> None:
    """Raises ProblemError where a shape is none that ``triangle_attention`` takes."""
    if q.dim() < 5:
        raise ProblemError(f"q has shape {tuple(q.shape)}; it must be (batch, N, heads, S, head_dim).")
    keys = k.shape[-2] if k.dim() == q.dim() else q.shape[-2]
    wanted = {"k": (*q.shape[:-2], keys, q.shape[-1]), "v": (*q.shape[:-2], keys, v.shape[-1])}
    wanted["bias"] = (*q.shape[:-4], 1, *q.shape[-3:-1], keys)
    wanted["mask"] = (*q.shape[:-3], 1, 1, keys)
    for name, x in {"k": k, "v": v, "bias": bias, "mask": mask}.items():
        if x is None and name == "mask":
            continue
        shapes = [wanted[name], (*q.shape[:-4], 1, 1, 1, keys)] if name == "mask" else [wanted[name]]
        if x is None or tuple(x.shape) not in shapes:
            found = "None" if x is None else f"of shape {tuple(x.shape)}"
            raise ProblemError(f"{name} is {found}; it must be of shape {wanted[name]}, as q is {tuple(q.shape)}.")
    if mask is not None and mask.dtype != torch.bool:
        raise ProblemError(f"mask is of {mask.dtype}; it must be of bools: whether a key is kept.")


def join(x: Any, dim: int) -> Any:
    """Returns a tensor whose dimensions up to ``dim`` are one, with its last dimension side by side."""
    x = x.flatten(0, dim)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def join_rows(x: Any, rows: Any) -> Any:
    """Returns what each of all rows has of its keys, (rows, S_k), of a tensor (..., N or 1, 1, 1, S_k)."""
    return join(x[..., 0, 0, :].expand(*rows, x.shape[-1]), -2)


@torch.no_grad()
def _find_largest(qkv: Any, bias: Any, keep: Any, scale: float | None) -> Any:
    """Finds the largest logit of each query, row by row."""
    q, k, _ = (x.detach().transpose(1, 2) for x in qkv)
    n, found = len(q) // max(1, len(bias)), []
    number = torch.float64 if q.dtype == torch.float64 else torch.float32  # a product in 16 bits would be rounded to these
    for i in range(len(q)):
        logits = q[i].to(number) @ k[i].to(number).mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias[i // n]
        found.append((logits if keep is None else logits.masked_fill(~keep[i], -math.inf)).amax(-1).to(number))
    return torch.stack(found) if found else q.new_empty(q.shape[:-1], dtype=number)
