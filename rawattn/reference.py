"""The specification: what attention is, in float64 and plain array operations, on NumPy, CuPy or torch.

    o[i] = sum_j p[i, j] v[j],   p[i, j] = exp(s[i, j] - lse[i]),   lse[i] = log sum_j exp(s[i, j])

over the keys j that the mask keeps for the query i, where the logit s[i, j] is scale * q[i].k[j], or what the score makes of it
(Vaswani et al., arXiv 1706.03762, equation 1). Kernels compute the same sums in blocks, with a running maximum (Milakov and
Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .errors import UnsupportedError
from .spec import make_mask, make_scale, make_score
from .variant.mask import Mask
from .variant.score import Scale, Score, Softcap

LOGITS = 1 << 22  # that are held at once


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None, scale: float | None = None, mask: Mask | None = None, score: Score | None = None,
    cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, return_lse: bool = False, rows: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """Attention in float64, slow and exact, to compare with.

    >>> o = rawattn.reference.attention(q, k, v, causal=True)

    Args:
        q: (batch, q_len, heads, head_dim), of any float dtype and strides: a NumPy or CuPy array or a torch tensor.
        k, v: (batch, kv_len, kv_heads, head_dim) and (batch, kv_len, kv_heads, head_dim_v), in q's library.
        causal, window, softcap, scale, mask, score: as in ``rawattn.attention``.
        cu_seqlens_q, cu_seqlens_kv: (batch + 1,) integers; then q, k, v are (total, heads, head_dim), sequences end to end.
        return_lse: give (o, lse).
        rows: compute these queries only, numbered in each sequence, or in all of q where sequences are end to end.

    Returns:
        o (batch, q_len, heads, head_dim_v) or (total_q, heads, head_dim_v), and with ``return_lse`` lse (batch, heads, q_len) or
        (heads, total_q), natural logarithms; float64, in q's library and on its device. ``rows`` gives len(rows) for q_len.

    A query that keeps no key, or whose kept logits are all -inf, has o = 0 and lse = -inf. A masked key or value takes no part,
    whatever it holds; NaN in q or in a kept key makes the row NaN.
    """
    formula = _formula(q, "float64", lambda x: x, causal, window, softcap, scale, mask, score)
    return formula.all(q, k, v, cu_seqlens_q, cu_seqlens_kv, return_lse, rows)


def rounded(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None, scale: float | None = None, mask: Mask | None = None, score: Score | None = None,
    cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, return_lse: bool = False, rows: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """The plain formula in float32, its logits and probabilities rounded to q's dtype: the yardstick for a kernel's error.

    Takes what ``attention`` takes, and gives the same results as float32.
    """
    formula = _formula(q, "float32", lambda x: _cast(_cast(x, q.dtype), x.dtype), causal, window, softcap, scale, mask, score)
    return formula.all(q, k, v, cu_seqlens_q, cu_seqlens_kv, return_lse, rows)


def _cast(x: Any, dtype: Any) -> Any:
    return x.detach().to(dtype) if hasattr(x, "detach") else x.astype(dtype)


def _formula(
    q: Any, number: str, rounding: Callable[[Any], Any], causal: Any, window: Any, softcap: Any, scale: Any, mask: Any, score: Any
) -> _Formula:
    xp = sys.modules[type(q).__module__.partition(".")[0]]
    place = {"device": q.device} if xp.__name__ == "torch" else {}
    given = make_scale(scale)
    return _Formula(
        xp,
        place,
        getattr(xp, number),
        rounding,
        make_mask(causal, window, mask),
        make_score(softcap, score),
        q.shape[-1] ** -0.5 if given is None else given,
    )


@dataclasses.dataclass(frozen=True)
class _Formula:
    """The formula for one library, device and precision; ``rounding`` is applied to logits and to probabilities."""

    xp: Any
    place: dict[str, Any]
    dtype: Any
    rounding: Callable[[Any], Any]
    mask: Mask
    score: Score
    scale: float

    def all(self, q: Any, k: Any, v: Any, cu_q: Any, cu_kv: Any, return_lse: bool, rows: Sequence[int] | None) -> Any:
        xp, wanted = self.xp, np.arange(q.shape[-3]) if rows is None else np.asarray(rows, np.int64)
        batch = q.shape[:-3]
        with q.device if xp.__name__ == "cupy" else contextlib.nullcontext(), np.errstate(all="ignore"):
            o = xp.zeros((*batch, len(wanted), q.shape[-2], v.shape[-1]), dtype=self.dtype, **self.place)
            lse = xp.full((*batch, q.shape[-2], len(wanted)), -float("inf"), dtype=self.dtype, **self.place)
            if batch:
                for i in range(len(q)):
                    self.sequence(q[i], k[i], v[i], o[i], lse[i], wanted, np.arange(len(wanted)))
            else:
                starts_q, starts_kv = (list(map(int, cu)) for cu in (cu_q, cu_kv))
                for first, last, k_first, k_last in zip(starts_q, starts_q[1:], starts_kv, starts_kv[1:], strict=False):
                    at = np.nonzero((wanted >= first) & (wanted < last))[0]
                    keys = slice(k_first, k_last)
                    self.sequence(q[first:last], k[keys], v[keys], o, lse, wanted[at] - first, at)
        return (o, lse) if return_lse else o

    def sequence(self, q: Any, k: Any, v: Any, o: Any, lse: Any, queries: Any, at: Any) -> None:
        """Writes the queries of one sequence to the rows ``at`` of o and lse."""
        block = max(1, LOGITS // max(1, len(k)))
        for i in range(0, len(queries), block):
            chosen, to = queries[i : i + block], self.xp.asarray(at[i : i + block], **self.place)
            begin, end = self.mask.interval(chosen, len(q), len(k))
            low, high = int(begin.min()), int(end.max())
            if low >= high:
                continue
            j = np.arange(low, high)
            kept = self.xp.asarray((j >= begin[:, None]) & (j < end[:, None]), **self.place)
            chosen = self.xp.asarray(chosen, **self.place)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // k.shape[1])
                rows, keys, values = q[:, head][chosen], k[low:high, kv_head], v[low:high, kv_head]
                o[to, head], lse[head, to] = self.block(
                    _cast(rows, self.dtype), _cast(keys, self.dtype), _cast(values, self.dtype), kept
                )

    def block(self, q: Any, k: Any, v: Any, kept: Any) -> Any:
        """o and lse of some queries of one head."""
        xp = self.xp
        s = self.scale * (q @ k.T)
        if isinstance(self.score, Softcap):
            s = self.score.cap * xp.tanh(s / self.score.cap)
        elif not isinstance(self.score, Scale):
            raise UnsupportedError(f"the reference has no formula for the score {self.score!r}.")
        s = xp.where(kept, self.rounding(s), -float("inf"))
        m = xp.amax(s, axis=-1, keepdims=True)
        p = xp.exp(s - xp.where(m == -float("inf"), 0.0, m))
        total = xp.sum(p, axis=-1, keepdims=True)
        empty = total == 0
        p = self.rounding(p / xp.where(empty, 1.0, total))
        infinite = ~xp.all(xp.isfinite(v), axis=1)
        o = p @ xp.where(infinite[:, None], 0.0, v)
        for j in (j for j, found in enumerate(infinite.tolist()) if found):  # 0 times a masked inf or NaN would be NaN
            o += xp.where(kept[:, j, None], p[:, j, None] * v[j], 0.0)
        return xp.where(empty, 0.0, o), (m + xp.log(total))[:, 0]
