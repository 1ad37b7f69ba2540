"""DeepSpeed's ``DS4Sci_EvoformerAttention``, with its signature, computed by rawattn.

>>> from rawattn.integrations.deepspeed import DS4Sci_EvoformerAttention
>>> o = DS4Sci_EvoformerAttention(q, k, v, [mask_bias, pair_bias])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..api import attention
from ..api.pairs import pair_options
from ..errors import ProblemError
from .cuequivariance import join, join_rows


@torch.compiler.disable  # biases of a batch become functions, which no graph holds
def DS4Sci_EvoformerAttention(Q: Any, K: Any, V: Any, biases: Sequence[Any]) -> Any:
    """softmax(Q K^T / sqrt(head_dim) + mask_bias + pair_bias) V.

    Args:
        Q, K, V: (..., N, S, heads, head_dim), bf16 or fp16, and here fp32 and fp64, too.
        biases: up to two, either of which may be None: mask_bias, (..., N, 1, 1, S), and pair_bias, (..., 1, heads, S, S). They
            are floats of any format, which are added, and have gradients in it. Other than in DeepSpeed the list stays as it was.

    Returns o, (..., N, S, heads, head_dim). A query whose biases are all -inf gives 0. Raises ProblemError where shapes
    contradict each other.
    """
    if len(biases) > 2:
        raise ProblemError(f"biases has {len(biases)} biases; it must be up to two, of keys and of pairs.")
    if Q.dim() < 5 or K.shape != Q.shape or V.shape != Q.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (Q, K, V))
        raise ProblemError(f"Q, K and V have the shapes {shapes}; they must be one, (batch, N, S, heads, head_dim).")
    of_keys, of_pairs = (*biases, None, None)[:2]
    rows, (length, heads) = Q.shape[:-3], Q.shape[-3:-1]
    wanted = (*rows, 1, 1, length), (*rows[:-1], 1, heads, length, length)
    for i, (bias, shape) in enumerate(zip((of_keys, of_pairs), wanted, strict=True)):
        if bias is not None and tuple(bias.shape) != shape:
            raise ProblemError(f"biases[{i}] has shape {tuple(bias.shape)}; it must be {shape}, as Q is {tuple(Q.shape)}.")
    key_bias = None if of_keys is None else join_rows(of_keys, rows)
    pairs = None if of_pairs is None else join(of_pairs.squeeze(-4), -4)
    o = attention.attention(*(join(x, -4) for x in (Q, K, V)), **pair_options(pairs, rows[-1], key_bias))
    return o.unflatten(0, rows)
