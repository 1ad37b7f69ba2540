"""MIT's Block-Sparse-Attention: ``block_sparse_attn_func`` by ``rawattn.attention_varlen`` over lists of blocks."""

from __future__ import annotations

from typing import Any

import torch

from ..api.attention import attention_varlen
from ..errors import ProblemError, UnsupportedError
from ..operation.keys import Blocks
from .block_lists import list_blocks

BLOCK = 128  # of queries and of keys


def block_sparse_attn_func(
    q_unpad: Any, k_unpad: Any, v_unpad: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, head_mask_type: Any, streaming_info: Any,
    base_blockmask: Any, max_seqlen_q_: int, max_seqlen_k_: int, p_dropout: float, deterministic: bool = False,
    softmax_scale: float | None = None, is_causal: bool = False, exact_streaming: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of packed sequences, (total, heads, head_dim), in which some heads have masks of blocks of 128.

    >>> o = block_sparse_attn_func(q, k, v, cu, cu, torch.tensor([0, 1]), None, mask, 512, 512, 0.0, is_causal=True)

    Args:
        head_mask_type: (heads,) integers, which the host reads: 0 for a head without a mask, 1 for base_blockmask's next one.
        base_blockmask: bools, (batch, masks, ceil(max_seqlen_q_ / 128), ceil(max_seqlen_k_ / 128)).
        deterministic: gradients have the same bits on every run, whatever it says.

    Returns o, with gradients. Dropout, probabilities and streaming heads (-1) are refused.
    """
    types = [int(x) for x in head_mask_type.tolist()]
    refused = {"p_dropout": p_dropout, "return_attn_probs": return_attn_probs, "exact_streaming": exact_streaming}
    for name, value in refused.items():
        if value:
            raise UnsupportedError(f"{name} is {value}; lists of blocks have none of it: leave it out.")
    if min(types, default=0) < 0:
        raise UnsupportedError(
            "head_mask_type has -1, a streaming head; give its blocks in base_blockmask, or call with a window."
        )
    shape = len(cu_seqlens_q) - 1, sum(x > 0 for x in types), -(-max_seqlen_q_ // BLOCK), -(-max_seqlen_k_ // BLOCK)
    if shape[1] and tuple(base_blockmask.shape) != shape:
        raise ProblemError(f"base_blockmask has shape {tuple(base_blockmask.shape)}; it must be {shape}.")
    kv_lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
    there = (torch.arange(shape[3], device=q_unpad.device) * BLOCK < kv_lens[:, None])[:, None].expand(
        shape[0], shape[2], shape[3]
    )
    masks = iter(range(shape[1]))
    each = [there & base_blockmask[:, next(masks)].bool() if x > 0 else there for x in types]
    kept = torch.stack(each, 1)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q_, max_seqlen_k_
    keys = Blocks(*list_blocks(kept), BLOCK, BLOCK)
    return attention_varlen(q_unpad, k_unpad, v_unpad, *lengths, causal=is_causal, scale=softmax_scale, keys=keys)
