"""MoBA's ``moba_attn_varlen`` (arXiv 2502.13189): packed causal sequences whose queries choose chunks of keys one by one."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..api.attention import attention_varlen
from ..errors import ProblemError
from ..operation.keys import Blocks
from .block_lists import list_blocks

BLOCK = 64  # queries that have one list: all chunks that any of them chose


def moba_attn_varlen(q: Any, k: Any, v: Any, cu_seqlens: Any, max_seqlen: int, moba_chunk_size: int, moba_topk: int) -> Any:
    """Causal attention of each query to its own chunk, and to the moba_topk - 1 chunks before it whose mean keys suit it best.

    >>> o = moba_attn_varlen(q, k, v, cu_seqlens, max_seqlen=4096, moba_chunk_size=512, moba_topk=3)

    Args:
        q: (total, heads, head_dim). k and v: (total, kv_heads, head_dim), of which MoBA itself has as many heads as q.
        cu_seqlens: int32, (batch + 1,), on q's device. Chunks are counted from the beginning of each sequence.
        max_seqlen: the longest length. It must not be too small: queries behind it keep no key.
        moba_chunk_size: keys of a chunk, from 1 up; least is read where it is a multiple of 64.
        moba_topk: chunks of a query. 1 is its own alone, as in MoBA's formula.

    Returns o, (total, heads, head_dim), with gradients, which do not go through the choice. Queries choose exactly: 64 of them
    have a list of what any one chose, and a score leaves out what others did. So a GPU reads the more, the less neighbours agree.
    To choose, q and k are copied into rows of max_seqlen, and batch * heads * max_seqlen * chunks scores are made and sorted.
    """
    for name, value in (("max_seqlen", max_seqlen), ("moba_chunk_size", moba_chunk_size), ("moba_topk", moba_topk)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ProblemError(f"{name} is {value!r}; it must be an int from 1 up.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != q.shape[0]:
            raise ProblemError(
                f"{name} has shape {tuple(x.shape)}; it must be (total, heads, head_dim), with q's {q.shape[0]} rows."
            )
    chosen = _choose(q.detach(), k.detach(), cu_seqlens, max_seqlen, moba_chunk_size, moba_topk)
    keys = _list_chosen(chosen, moba_chunk_size)
    packed = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return attention_varlen(q, k, v, *packed, causal=True, score=_keep_chosen(chosen, moba_chunk_size), keys=keys)


def _choose(q: Any, k: Any, cu_seqlens: Any, longest: int, chunk: int, topk: int) -> Any:
    """Bools, (batch, heads, longest, chunks): the chunks that each query of a sequence attends to, and any that are behind it."""
    rows = cu_seqlens[:-1, None] + torch.arange(longest, device=q.device)
    rows = rows.clamp(max=max(0, q.shape[0] - 1))  # behind a sequence lies what no query of it may choose
    wide = torch.promote_types(q.dtype, torch.float32)
    means = k[rows[:, : longest // chunk * chunk]].unflatten(1, (-1, chunk)).mean(2, dtype=wide)
    gate = torch.einsum("bihgd,bjhd->bhgij", q[rows].to(wide).unflatten(2, (k.shape[1], -1)), means).flatten(1, 2)
    chunks = -(-longest // chunk)
    gate = torch.nn.functional.pad(gate, (0, chunks - gate.shape[-1]))
    before = torch.arange(chunks, device=q.device) - (torch.arange(longest, device=q.device) // chunk)[:, None]
    gate = gate.masked_fill(before > 0, -math.inf).masked_fill(before == 0, math.inf)
    best = torch.argsort(-gate, dim=-1, stable=True)[..., :topk]
    return torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, best, True)


def _list_chosen(chosen: Any, chunk: int) -> Blocks:
    """For each block of queries the blocks of keys up to it that have a key of a chunk that any of these queries chose."""
    (longest, chunks), device, size = chosen.shape[2:], chosen.device, 64 if chunk % 128 else 128
    any_of = torch.nn.functional.pad(chosen, (0, 0, 0, -longest % BLOCK)).unflatten(2, (-1, BLOCK)).any(3)
    first, each = torch.arange(0, longest, size, device=device), torch.arange(chunks, device=device)[:, None]
    overlap = (first // chunk <= each) & (each <= (first + size - 1) // chunk)
    ends = torch.arange(BLOCK, longest + BLOCK, BLOCK, device=device)
    kept = (any_of.float() @ overlap.float() > 0) & (first < ends[:, None])
    return Blocks(*list_blocks(kept), BLOCK, size)


def _keep_chosen(chosen: Any, chunk: int) -> Any:
    """A score, since beside lists it has gradients on GPUs, where a mask that is a function has none."""
    return lambda s, b, h, q, kv: torch.where(chosen[b, h, q, kv // int(chunk)], s, -math.inf)
