"""FastVideo's video sparse attention (VSA): ``video_sparse_attn`` and ``video_sparse_attn_bshd`` over lists of blocks."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..api.attention import attention
from ..errors import ProblemError, UnsupportedError
from ..sparse import top_blocks
from .block_lists import keep_filled, make_keys


def video_sparse_attn(
    q: Any, k: Any, v: Any, variable_block_sizes: Any, q_variable_block_sizes: Any = None, topk: Any = None,
    block_size: Any = 64, compress_attn_weight: Any = None,
) -> Any:  # fmt: skip
    """Attention among means of blocks, times compress_attn_weight, and attention of each block of queries to its best blocks.

    >>> o = video_sparse_attn(q, k, v, sizes, sizes, topk=32, block_size=(4, 4, 4), compress_attn_weight=gate)

    Args:
        q: (batch, heads, q_len, head_dim). k and v: (batch, heads, kv_len, head_dim). Lengths are multiples of a block's tokens.
        variable_block_sizes: integers, (blocks of keys,), on q's device: how many tokens of a block are there, from 1 up. The
            rest is padding at its end, which must be 0, since a mean is the sum of all rows by this number. None where all are
            there, which saves the kernels a look at each key.
        q_variable_block_sizes: the same for q; None for those of the keys, as before FastVideo had it.
        topk: blocks of a list; all of them where it is more.
        block_size: a block's (frames, rows, columns), or an int for three equal ones; 64, 128, 192, ... tokens together.
        compress_attn_weight: of q's shape, or None for 1.

    Returns o of q's shape, which lies as (batch, q_len, heads, head_dim), with gradients of all four float arrays. Rows of
    padding hold what such queries give. Means, scores and their softmax are computed in float32, or float64 of such inputs, and
    rounded once; of equal scores the first block is taken.
    """
    q, k, v, gate = (None if x is None else x.transpose(1, 2) for x in (q, k, v, compress_attn_weight))
    sizes = variable_block_sizes, q_variable_block_sizes
    return video_sparse_attn_bshd(q, k, v, *sizes, topk, block_size, gate).transpose(1, 2)


def video_sparse_attn_bshd(
    q: Any, k: Any, v: Any, variable_block_sizes: Any, q_variable_block_sizes: Any = None, topk: Any = None,
    block_size: Any = 64, compress_attn_weight: Any = None,
) -> Any:  # fmt: skip
    """``video_sparse_attn`` of q, k, v and compress_attn_weight as (batch, length, heads, head_dim), as rawattn has them."""
    block = math.prod((block_size,) * 3 if isinstance(block_size, int) else block_size)
    if block < 64 or block % 64:
        raise UnsupportedError(f"block_size is {block_size!r}, {block} tokens; it must be 64 or a multiple: (4, 4, 4) or 4.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or x.shape[1] % block or (x.shape[0], *x.shape[2:]) != (q.shape[0], *q.shape[2:]):
            need = f"4 dimensions, a length that is a multiple of {block}, and q's others"
            raise ProblemError(f"{name} is (batch, length, heads, head_dim) = {tuple(x.shape)}; it must have {need}.")
    if compress_attn_weight is not None and compress_attn_weight.shape != q.shape:
        found = tuple(compress_attn_weight.shape)
        raise ProblemError(f"compress_attn_weight has shape {found}; it must have q's, {tuple(q.shape)}.")
    of_q = variable_block_sizes if q_variable_block_sizes is None else q_variable_block_sizes
    queries = _average(q, of_q, block, "q_variable_block_sizes")
    keys, values = (_average(x, variable_block_sizes, block, "variable_block_sizes") for x in (k, v))
    if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
        raise ProblemError(f"topk is {topk!r}; it must be an int from 1 up.")
    best = top_blocks(queries, keys, min(topk, k.shape[1] // block), block_q=1, block_kv=1, share_heads=False)
    score = None if variable_block_sizes is None else keep_filled(variable_block_sizes, block)
    fine = attention(q, k, v, keys=make_keys(*best.arrays, block, block, k.shape[1]), score=score)
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", queries, keys) * q.shape[3] ** -0.5, -1)
    coarse = torch.einsum("bhij,bjhd->bihd", weights, values).to(fine.dtype)[:, :, None]
    fine = fine.unflatten(1, (-1, block))
    if compress_attn_weight is None:
        return (fine + coarse).flatten(1, 2)
    return torch.addcmul(fine, coarse, compress_attn_weight.unflatten(1, (-1, block))).flatten(1, 2)


def _average(x: Any, sizes: Any, block: int, name: str) -> Any:
    """The means of blocks of x, in float32 or float64: (batch, blocks, heads, head_dim)."""
    blocks = x.shape[1] // block
    sums = x.unflatten(1, (blocks, block)).sum(2, dtype=torch.promote_types(x.dtype, torch.float32))
    if sizes is None:
        return sums / block
    if not isinstance(sizes, torch.Tensor) or tuple(sizes.shape) != (blocks,) or sizes.is_floating_point():
        found = f"{sizes.dtype} of shape {tuple(sizes.shape)}" if isinstance(sizes, torch.Tensor) else repr(sizes)
        raise ProblemError(f"{name} is {found}; it must be a tensor of integers of shape ({blocks},), one for each block.")
    return sums / sizes[:, None, None]
