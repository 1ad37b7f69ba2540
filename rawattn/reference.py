"""The specification: what attention is, in float64 and plain array operations, on NumPy, CuPy or torch.

    o[i] = sum_j p[i, j] v[j],   p[i, j] = exp(s[i, j] - lse[i]),   lse[i] = log sum_j exp(s[i, j])

over the keys j that the mask keeps for the query i, where the logit s[i, j] is scale * q[i].k[j], or what the score makes of it
(Vaswani et al., arXiv 1706.03762, equation 1). Kernels compute the same sums in blocks, with a running maximum (Milakov and
Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).

A query that keeps no key, or whose kept logits are all -inf, has output 0 and lse -inf. A masked key or value takes no part,
whatever it holds; a NaN in q or in a kept key makes the row NaN.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arrays
from .problem import make_mask, make_scale, make_score
from .variant import mask as masks
from .variant import score as scores

LOGITS = 1 << 24  # that are held at once


def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, rows: Sequence[int] | None = None, **options: Any) -> Any:
    """Attention in float64, in the library and on the device of q: o, or (o, lse) with ``return_lse``.

    >>> o = rawattn.reference.attention(q, k, v, causal=True)

    q (batch, q_len, heads, head_dim), k (batch, kv_len, kv_heads, head_dim), v (batch, kv_len, kv_heads, head_dim_v), of any
    float dtype and strides; o (batch, q_len, heads, head_dim_v), lse (batch, heads, q_len), in natural logarithms. With
    ``cu_seqlens_q`` and ``cu_seqlens_kv``, (batch + 1,) integers, sequences lie end to end: (total, heads, dim), lse (heads,
    total_q). ``rows`` computes only these queries (of every sequence; of the packed rows with cu_seqlens): o and lse have len(rows)
    in place of the query dimension. The ``options`` causal, window, softcap, scale, mask, score are those of
    ``rawattn.attention``.
    """
    return _attention(q, k, v, _double, lambda x: x, return_lse=return_lse, rows=rows, **options)


def rounded(q: Any, k: Any, v: Any, *, return_lse: bool = False, rows: Sequence[int] | None = None, **options: Any) -> Any:
    """The plain formula as a careful user would write it: float32 sums, with logits and probabilities rounded to q's dtype.

    Takes and returns what ``attention`` does. Its error is the yardstick for the error of a kernel.
    """
    return _attention(q, k, v, _single, _rounding(q), return_lse=return_lse, rows=rows, **options)


def _double(x: Any) -> Any:
    return x.double() if hasattr(x, "double") else x.astype(np.float64)


def _single(x: Any) -> Any:
    return x.float() if hasattr(x, "float") else x.astype(np.float32)


def _rounding(q: Any) -> Callable[[Any], Any]:
    if q.dtype.itemsize != 2:
        return _single
    return (lambda x: x.to(q.dtype).float()) if hasattr(q, "to") else (lambda x: x.astype(q.dtype).astype(np.float32))
