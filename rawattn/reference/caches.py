"""Attention over caches, and what writes to them, in float64 and NumPy: a row or a sequence after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..array.reading import read
from ..errors import ProblemError
from ..operation import arguments, functions
from ..operation.keys import parted
from ..operation.spec import Options, make_mask, make_score
from ..variant.element import ELEMENTS, Element, Record
from ..variant.mask import FromKey, Intersection, Mask, Pairs, causal_and
from ..variant.score import Score
from .formula import INF, listed, make_formula, to_numpy
from .records import dequantize, quantize

if TYPE_CHECKING:
    from ..serving import KVCache, Rotary, Step


@arguments.named
def attention_kvcache(
    q: Any, cache: KVCache, step: Step, *, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
    scale: float | None = None, mask: Mask | None = None, score: Score | None = None, sinks: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention over a cache in float64: each sequence's keys are gathered from their pages, and ``attention`` is computed.

    >>> o = rawattn.reference.attention_kvcache(q, cache, step)

    Arguments as in ``rawattn.attention_kvcache``, of any library.

    Returns:
        o, and with ``return_lse`` (o, lse), in the shapes that ``rawattn.attention_kvcache`` gives; float64, in NumPy. Rows of q
        that belong to no sequence have o = 0 and lse = -inf.
    """
    queries = np.concatenate([to_numpy(x) for x in q], -1) if isinstance(q, (tuple, list)) else to_numpy(q)
    sinks = None if sinks is None else to_numpy(sinks)
    o = np.zeros((*queries.shape[:-1], cache.head_dim_v))
    lse = np.full((*queries.shape[:-3], queries.shape[-2], queries.shape[-3]), -INF)
    numbers, counts, kind = parted(step.keys)
    lists = None if kind is None else listed(kind, numbers, counts, queries.shape[-2])
    batch = step.batch if step.form != "rows" or step.cu_seqlens_q is not None else len(queries)
    for i, (rows, at) in enumerate(_find_rows(step, batch)):
        run = _make_mask(step, i, window, None if functions.is_function(mask) else mask)
        kv_len, page_and_row = _find_pages(cache, step, i)
        begin, end = run.interval(np.arange(len(queries[rows])), len(queries[rows]), kv_len)
        some = begin < end
        kept: Sequence[int] = range(begin[some].min(), end[some].max()) if some.any() else range(0)
        k, v = (np.zeros((1, kv_len, cache.kv_heads, dim)) for dim in (cache.head_dim, cache.head_dim_v))
        token = i * queries.shape[1] if isinstance(rows, int) else rows.start
        if lists is not None:
            places = ((token + n, n, h) for n in range(len(queries[rows])) for h in range(queries.shape[-2]))
            named = {j for place in places for j in lists.of(i, *place, kv_len, strict=False).tolist()}
            kept = sorted(named & {*kept})
        for j in kept:  # the others may lie nowhere
            k[0, j], v[0, j] = _read_key(cache, i, *page_and_row(j))
        sequence_q = queries[rows][None]
        mask_function = mask if functions.is_function(mask) else None
        formula = make_formula(
            sequence_q, k, Options(softcap=softcap, scale=scale, mask=mask_function, score=score, q_offset=0, kv_offset=0)
        )
        seen = {"q_offset": kv_len - sequence_q.shape[1]}  # positions are below 0 before the first key
        within = run if mask_function is None else _Within(run, dataclasses.replace(formula.mask, **seen))  # type: ignore[type-var]
        logit = dataclasses.replace(formula.score, **seen) if functions.is_function(score) else make_score(softcap, score)
        formula = dataclasses.replace(formula, mask=within, score=logit, first=i, lists=lists, token=token)
        o[rows], lse[at] = (x[0] for x in formula.forward(sequence_q, k, v, sinks, None, None))
    return (o, lse) if return_lse else o


@dataclasses.dataclass(frozen=True)
class _Within(Pairs):
    """The pairs of a run of keys that a function keeps."""

    run: Pairs
    base: Pairs

    def interval(self, q: Any, q_len: int, kv_len: int) -> Any:
        return Intersection(self.run, self.base).interval(q, q_len, kv_len)

    @property
    def keep(self) -> Any:
        return self.base.keep


@arguments.named
def append(
    cache: KVCache, step: Step | None, k: Any, v: Any, *, slots: Any = None, rotary: Rotary | None = None, q: Any = None
) -> tuple[Any, ...]:
    """Computes what ``rawattn.append`` leaves in a cache and gives, in float64, one row after the other.

    >>> k_pool, v_pool = rawattn.reference.append(cache, step, k, v)

    Returns:
        Copies of cache.k and cache.v with the new rows, and with ``q`` the rotated q; NumPy, float64. Rows of q that belong to no
        sequence are NaN. A cache of e4m3 or e5m2 holds a row in its own format divided by the cache's scale, in float32, rounded
        to nearest even, the largest finite number for one beyond it, and NaN for NaN. Records are one array of uint8.
    """
    is_record = isinstance(cache.element, Record)
    pools = [to_numpy(cache.k).copy()] if is_record else [to_numpy(x).astype(np.float64) for x in (cache.k, cache.v)]
    new_k, new_v, new_q = (None if x is None else to_numpy(x) for x in (k, v, q))
    rows = new_q if new_k is None else new_k
    assert rows is not None
    element = ELEMENTS[read(q if k is None else k, "k").dtype]
    q_out = None if new_q is None else np.full(new_q.shape, np.nan)
    owners = [0] * len(rows) if step is None else [step.batch - 1] * len(rows)  # the sequence of each row, where they are ragged
    for owner, (q_rows, _) in enumerate(() if step is None or step.cu_seqlens_q is None else _find_rows(step)):
        owners[q_rows] = [owner] * (q_rows.stop - q_rows.start)
    in_sequences = {} if step is None else _find_new_rows(cache, step, rows.shape[:-2])
    for at in np.ndindex(rows.shape[:-2]):
        i, position_in_sequence = in_sequences.get(at, (-1, -1))
        row_k, page, row = None if new_k is None else new_k[at], -1, 0
        if slots is not None:
            page, row = divmod(int(to_numpy(slots)[at]), cache.page_size)
        elif step is not None and position_in_sequence >= 0 and new_k is not None:
            page, row = _find_pages(cache, step, i)[1](position_in_sequence)
        if rotary is not None:
            position = position_in_sequence if rotary.positions is None else int(to_numpy(rotary.positions)[at])
            if position < 0 and page >= 0 and rotary.positions is not None:
                raise ProblemError(f"positions has {position} for a row that goes into the cache; it must be from 0 up.")
            if position < 0:
                continue
            row_k = None if new_k is None else _rotate(new_k[at], rotary, position, rotary.first_column)
            if q_out is not None and new_q is not None:
                q_first = rotary.first_column - (cache.head_dim - new_q.shape[-1])
                q_out[at] = _rotate(new_q[at], rotary, position, q_first)
        owner = at[0] if len(at) == 2 else owners[at[0]]
        if isinstance(cache.element, Record) and row_k is not None and page >= 0:
            pools[0][page, row] = quantize(cache.element, row_k[0])
            continue
        for name, pool, x in zip("kv", pools, (row_k, None if new_v is None else new_v[at]), strict=False):
            if x is not None and page >= 0:
                _row(pool, cache.layout, page, row)[...] = _store(cache, name, x, owner, element)
    if cache.v_in_k and not is_record:
        first_column = (cache.arrays["v"].pointer - cache.arrays["k"].pointer) // cache.element.itemsize
        pools[1] = pools[0][..., first_column : first_column + cache.head_dim_v]
    return tuple(pools) if q_out is None else (*pools, q_out)


def _find_new_rows(cache: KVCache, step: Step, shape: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, int]]:
    """The sequence of each new row and its place there, of sequences that take part."""
    rows: dict[tuple[int, ...], tuple[int, int]] = {}
    for i, (q_rows, _) in enumerate(_find_rows(step)):
        n = shape[1] if isinstance(q_rows, int) else q_rows.stop - q_rows.start
        kv_len, _ = _find_pages(cache, step, i)
        for j in range(n if kv_len > 0 else 0):
            rows[(i, j) if isinstance(q_rows, int) else (q_rows.start + j,)] = (i, kv_len - n + j)
    return rows


@arguments.named
def merge_states(parts: Sequence[tuple[Any, Any]], *, sinks: Any = None) -> tuple[Any, Any]:
    """Attention over the union of several sets of keys, from o and lse over each, in float64.

    >>> o, lse = rawattn.reference.merge_states([(o_0, lse_0), (o_1, lse_1)])

    lse = log(sum_p exp(lse_p) + exp(sink)), o = sum_p exp(lse_p - lse) o_p. A part with lse_p = -inf takes no part, whatever its
    o holds; a row without any has o = 0. Arguments as in ``rawattn.merge_states``; results are NumPy arrays.
    """
    terms = [(to_numpy(o).astype(np.float64), to_numpy(lse).astype(np.float64)) for o, lse in parts]
    with np.errstate(all="ignore"):
        logits = [lse for _, lse in terms] + ([] if sinks is None else [np.zeros_like(terms[0][1]) + to_numpy(sinks)[:, None]])
        top = np.max(logits, axis=0)
        base = np.where(np.isfinite(top), top, 0.0)
        weights = [np.where(top == INF, x == INF, np.exp(x - base)) for x in logits]
        total = np.sum(weights, axis=0)
        lse = np.where(np.isfinite(top), base + np.log(total), top)
        o = np.zeros_like(terms[0][0])
        for (o_p, lse_p), weight in zip(terms, weights, strict=False):
            share = np.swapaxes(np.where(total == 0, 0.0, weight / total), -1, -2)[..., None]
            o += np.where(np.swapaxes(lse_p, -1, -2)[..., None] == -INF, 0.0, share * o_p)
    return o, lse


def _find_rows(step: Step, batch: int | None = None) -> list[tuple[Any, Any]]:
    """Returns where each sequence's rows of q are, and of lse."""
    if step.cu_seqlens_q is None:
        return [(i, i) for i in range(step.batch if batch is None else batch)]
    ends = to_numpy(step.cu_seqlens_q).tolist()
    return [(slice(*ends[i : i + 2]), (slice(None), slice(*ends[i : i + 2]))) for i in range(step.batch)]


def _find_pages(cache: KVCache, step: Step, i: int) -> tuple[int, Callable[[int], tuple[int, int]]]:
    """The number of a sequence's keys, and a function that gives the page and the row of each."""
    size = cache.page_size
    if step.indptr is not None:
        first, last = to_numpy(step.indptr).tolist()[i : i + 2]
        kv_len = (last - first - 1) * size + int(to_numpy(step.last_page_len)[i]) if last > first else 0
        return kv_len, lambda j: (int(to_numpy(step.indices)[first + j // size]), j % size)
    if step.kv_lens is None:
        return cache.pages * size, lambda j: divmod(j, size)
    kv_len = int(to_numpy(step.kv_lens)[i])
    if step.page_table is None:
        return kv_len, lambda j: (i, j)
    return kv_len, lambda j: (int(to_numpy(step.page_table)[i, j // size]), j % size)


def _row(pool: Any, layout: str, page: int, row: int) -> Any:
    """(kv_heads, columns) of a row of a page."""
    x = pool[page][row] if layout == "NHD" else pool[page][:, row]
    return x if isinstance(pool, np.ndarray) and pool.dtype == np.float64 else to_numpy(x)


def _read_key(cache: KVCache, i: int, page: int, row: int) -> tuple[Any, Any]:
    """The key and the value of a sequence that lie in a row of a page, (kv_heads, columns)."""
    if isinstance(cache.element, Record):
        x = dequantize(cache.element, to_numpy(cache.k[page])[row][None])
        return x, x[:, : cache.head_dim_v]
    k, v = (_row(getattr(cache, n), cache.layout, page, row) * _get_scale(cache, n, i) for n in "kv")
    return k, v


def _get_scale(cache: KVCache, name: str, i: int) -> Any:
    """Returns what the stored k or v of a sequence is multiplied by: a number, or one for each head, (kv_heads, 1)."""
    if f"{name}_scale" not in cache.scale_arrays:
        return cache.scales["kv".index(name)]
    scales = np.atleast_2d(to_numpy(getattr(cache, f"{name}_scale")))
    return np.broadcast_to(scales[i if len(scales) > 1 else 0], (cache.kv_heads,))[:, None]


def _store(cache: KVCache, name: str, x: Any, i: int, element: Element) -> Any:
    """Returns what a cache holds for a row of k or v, (kv_heads, columns), which came in this format."""
    if cache.element == element:
        return x
    with np.errstate(all="ignore"):
        quotient = x.astype(element.dtype).astype(np.float32) / np.asarray(_get_scale(cache, name, i), np.float32)
        return np.clip(quotient, -cache.element.largest, cache.element.largest).astype(cache.element.dtype).astype(np.float64)


def _make_mask(step: Step, i: int, window: Any, mask: Any) -> Mask:
    """The mask of one sequence."""
    causal = bool(to_numpy(step.causal)[i]) if hasattr(step.causal, "shape") else step.is_causal
    base = causal_and(mask) if mask is not None and causal else mask
    result = make_mask(causal and mask is None, window, base)
    return result if step.kv_begin is None else FromKey(result, int(to_numpy(step.kv_begin)[i]))


def _rotate(x: Any, rotary: Rotary, position: int, first: int) -> Any:
    """The rows x (heads, columns) at a position, rotated from the column ``first`` on."""
    cos, sin = to_numpy(rotary.cos)[position], to_numpy(rotary.sin)[position]
    dim = 2 * len(cos)
    halves = (slice(0, dim, 2), slice(1, dim, 2)) if rotary.interleaved else (slice(dim // 2), slice(dim // 2, dim))
    result = x.copy()
    part, turned = x[:, first:], result[:, first:]
    turned[:, halves[0]] = part[:, halves[0]] * cos - part[:, halves[1]] * sin
    turned[:, halves[1]] = part[:, halves[1]] * cos + part[:, halves[0]] * sin
    return result
