"""Caches on the CPU: attention over pages where they lie, new keys and values, and results over different keys merged.

Lengths can be seen here, so a wrong one raises before anything is written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..driver.device import cpu as this_cpu
from ..errors import ProblemError
from ..operation import Append, AttentionKVCache, Combine, host_functions
from ..reference.records import dequantize, quantize
from ..variant.element import FP8, Record
from ..variant.mask import FromKey, causal_and
from ..variant.offset import OffsetMask, OffsetScore
from .cost import PRODUCTS_PER_SECOND, threads_for
from .forward import ONE_PAGE, CpuConfig, Sequence, run_sequences
from .lists import ListedSequence, run_lists
from .units import key_bounds

Array = npt.NDArray[Any]
Views = Mapping[str, Array]


class _Place(NamedTuple):
    """Says where a sequence lies: its rows of q, of lse, its keys, and its pages."""

    rows: Any
    lse_rows: Any
    q_len: int
    kv_len: int
    pages: Array


def _find_places(op: AttentionKVCache | Append, views: Views, q_len: int) -> Iterator[_Place]:
    """The sequences of a step, of ``q_len`` rows where they are not ragged. Raises ProblemError where a length is wrong."""
    starts = views.get("cu_seqlens_q")
    if starts is not None:
        total = op.total_q if isinstance(op, AttentionKVCache) else op.total
        if starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > total:
            text = np.array2string(starts, threshold=8)
            raise ProblemError(f"cu_seqlens_q is {text}; it must begin with 0, never fall, and end with at most {total}.")
    kv_lens, batch = kv_lens_of(op, views), op.batch
    most = op.kv_len
    if ((kv_lens < 0) | (kv_lens > most)).any():
        i = int(np.argmax((kv_lens < 0) | (kv_lens > most)))
        need = f"from 0 to {most}, what max_kv_len and the pages of a sequence allow"
        raise ProblemError(f"kv_lens[{i}] is {kv_lens[i]}; it must be {need}.")
    for i in range(batch):
        kv_len, pages = int(kv_lens[i]), _find_pages(op, views, i)
        if starts is None:
            yield _Place(i, i, q_len, kv_len, pages)
            continue
        rows = slice(int(starts[i]), int(starts[i + 1]))
        if rows.stop - rows.start > op.q_len:
            raise ProblemError(f"cu_seqlens_q has {rows.stop - rows.start} rows for sequence {i}; max_q_len allows {op.q_len}.")
        yield _Place(rows, (slice(None), rows), rows.stop - rows.start, kv_len, pages)


def kv_lens_of(op: AttentionKVCache | Append, views: Views) -> Array:
    """The keys of each sequence. Raises ProblemError where pages that lie end to end contradict each other."""
    if "indptr" not in views:
        return views["kv_lens"] if "kv_lens" in views else np.full(op.batch, op.kv_len)
    indptr, last, size = views["indptr"], views["last_page_len"], op.page_size
    if indptr[0] < 0 or (np.diff(indptr) < 0).any() or indptr[-1] > len(views["indices"]):
        text = np.array2string(indptr, threshold=8)
        raise ProblemError(f"indptr is {text}; it must never fall, and lie within the {len(views['indices'])} indices.")
    counts = np.diff(indptr)
    wrong = (counts > 0) & ((last < 1) | (last > size))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise ProblemError(f"last_page_len[{i}] is {last[i]}; it must be from 1 to {size}, the page_size.")
    return np.where(counts > 0, (counts - 1) * np.int64(size) + last, 0)


def _find_pages(op: AttentionKVCache | Append, views: Views, i: int) -> Array:
    if "indptr" in views:
        return views["indices"][views["indptr"][i] : views["indptr"][i + 1]]
    if "kv_lens" not in views:
        return np.arange(op.pages)
    return views["page_table"][i] if "page_table" in views else np.array([i], np.int32)


def _check_pages(op: AttentionKVCache | Append, views: Views, i: int, pages: Array, first: int, last: int) -> None:
    """Raises ProblemError where a page that keys first to last - 1 lie in is none of the cache's."""
    begin = first // op.page_size
    used = pages[begin : -(-last // op.page_size)]
    wrong = (used < 0) | (used >= op.pages)
    if wrong.any():
        j = int(np.argmax(wrong))
        name = f"indices[{views['indptr'][i] + begin + j}]" if "indptr" in views else f"page_table[{i}, {begin + j}]"
        raise ProblemError(f"{name} is {used[j]}; it must be a page of the cache, from 0 to {op.pages - 1}.")


def attend(op: AttentionKVCache, most_threads: int, views: Views, o: Array, lse: Array | None) -> None:
    """Computes attention over a cache, writing o and lse in place. Rows of q that belong to no sequence are left as they are."""
    q, k, v = views["q"], views["k_cache"], views.get("v_cache", views["k_cache"])
    q = np.concatenate((q, views["q_rope"]), -1) if op.q_rope else q
    causal_each, first = views.get("causal"), views.get("kv_begin")
    spec = host_functions.on_host(op.spec, views)
    masks = {False: spec.mask, True: causal_and(op.mask) if causal_each is not None else spec.mask}
    interval, widens = functools.lru_cache(maxsize=4096)(key_bounds), is_widened(op)
    sequences, places_of_rows, seconds = [], [], 0.0
    for i, (rows, at, q_len, kv_len, pages) in enumerate(_find_places(op, views, op.q_len)):
        mask, score = masks[causal_each is not None and bool(causal_each[i])], spec.score
        if spec is not op.spec:  # functions see positions
            mask = OffsetMask(mask, kv_len - q_len, 0) if mask.is_function else mask
            score = OffsetScore(score, kv_len - q_len, 0) if score.is_function else score
        if first is not None:
            if kv_len and not 0 <= first[i] <= kv_len:
                raise ProblemError(f"kv_begin[{i}] is {first[i]}; it must be from 0 to {kv_len}, the sequence's length.")
            mask = FromKey(mask, max(0, int(first[i])))
        begin, end = interval(mask, op.heads, q_len, kv_len)
        some = begin < end
        if some.any() and not op.keys:
            _check_pages(op, views, i, pages, int(begin[some].min()), int(end[some].max()))
        seconds += q_len * kv_len * op.heads * (op.head_dim + op.head_dim_v) / PRODUCTS_PER_SECOND
        places = q[rows], k, v, pages, kv_len, o[rows], None if lse is None else lse[at]
        sequence = Sequence(i, *places, mask, score, begin, end)
        sequences.append(_widen(op, views, sequence) if widens and not op.keys else sequence)
        places_of_rows.append(rows)
    threads = min(most_threads, threads_for(seconds, this_cpu()))
    loops = CpuConfig(256, 96 if op.head_dim + op.head_dim_v <= 512 else 48, threads)
    if op.keys:
        each = [
            ListedSequence.of(x, rows, _scales_of(op, views, x.batch)) for x, rows in zip(sequences, places_of_rows, strict=True)
        ]
        return run_lists(each, op, views["keys"], views.get("keys_counts"), views.get("sinks"), loops)
    run_sequences(sequences, op.heads, op.scale, views.get("sinks"), loops, invariant=op.spec.invariant)
    if widens:
        for sequence, place in zip(sequences, _find_places(op, views, op.q_len), strict=True):
            o[place.rows] = sequence.o


def is_widened(op: AttentionKVCache) -> bool:
    """Says whether keys and values have eight bits, or are records, and are widened before they are computed with."""
    return op.kv_element in FP8.values() or isinstance(op.kv_element, Record)


def _scales_of(op: AttentionKVCache, views: Views, i: int) -> tuple[Any, Any] | None:
    """The factors of a sequence's keys and values in eight bits, (kv_heads, 1); None for other formats."""
    if not is_widened(op):
        return None
    numbers = (("k_scale", op.k_scale), ("v_scale", op.v_scale))
    shape, number = (op.kv_heads, 1), op.element.lse_dtype
    k, v = (views[name][i] if name in views else np.full(shape, x, number) for name, x in numbers)
    return k, v


def _widen(op: AttentionKVCache, views: Views, sequence: Sequence) -> Sequence:
    """The sequence with keys and values in the format that is computed in, times their scales, and in one page; of those that no
    query keeps nothing is read."""
    number, some = op.element.lse_dtype, sequence.begin < sequence.end
    kept = np.arange(sequence.begin[some].min(initial=sequence.kv_len), sequence.end[some].max(initial=0))
    pages, at = sequence.pages[kept // op.page_size], kept % op.page_size
    k, v = (np.zeros((1, max(1, sequence.kv_len), op.kv_heads, dim), number) for dim in (op.head_dim, op.head_dim_v))
    if isinstance(op.kv_element, Record):
        k[0, kept] = dequantize(op.kv_element, views["k_cache"][pages, at], number)
        v = k[..., : op.head_dim_v]
    for name, x, scale in () if v.base is not None and v.base is k else (("k", k, op.k_scale), ("v", v, op.v_scale)):
        factor = views[f"{name}_scale"][sequence.batch] if f"{name}_scale" in views else np.asarray(scale, number)
        x[0, kept] = views[f"{name}_cache"][pages, at].astype(number) * factor
    q, o = sequence.q.astype(number), np.zeros(sequence.o.shape, number)
    return sequence._replace(q=q, k=k, v=v, pages=ONE_PAGE, o=o)


def append(op: Append, views: Views) -> None:
    """Writes new rows into a cache, and rotated queries into q_out."""
    k, size = views.get("k"), op.page_size
    rows = (views["q"] if k is None else k).shape[:-2]
    positions, slots = np.full(rows, -1, np.int64), np.full(rows, -1, np.int64)
    last = op.batch - 1 if op.lengths else 0  # whose rows of no sequence are
    owners = np.full(rows, last) if op.ragged else np.arange(rows[0])[:, None].repeat(rows[1], 1)  # the sequence of each row
    if op.lengths:
        for i, place in enumerate(_find_places(op, views, 0 if op.ragged else rows[1])):
            owners[place.rows] = i
            if place.kv_len == 0:  # it takes no part
                continue
            if place.kv_len < place.q_len:
                need = "kv_lens count the new rows too, or are 0 for a sequence that takes no part"
                raise ProblemError(f"kv_lens[{i}] is {place.kv_len} but {place.q_len} rows are new; {need}.")
            key_positions = np.arange(place.kv_len - place.q_len, place.kv_len)
            positions[place.rows] = key_positions
            if op.form != "slots" and place.q_len:
                _check_pages(op, views, i, place.pages, int(key_positions[0]), place.kv_len)
                slots[place.rows] = place.pages[key_positions // size].astype(np.int64) * size + key_positions % size
    if "slots" in views:
        slots = views["slots"]
        if (slots >= op.pages * size).any():
            raise ProblemError(f"slots has {slots.max()}; it must be below {op.pages * size}, pages times page_size, or -1.")
    written, q_out = slots >= 0, views.get("q_out")
    if op.rotary:
        positions = views.get("positions", positions)
        written &= positions >= 0
        if op.positions and (slots >= 0)[positions < 0].any():
            position = positions[(slots >= 0) & (positions < 0)][0]
            raise ProblemError(f"positions has {position} for a row that goes into the cache; it must be from 0 up.")
        if (positions >= op.max_positions).any():
            raise ProblemError(f"a row has position {positions.max()}; cos and sin have {op.max_positions} positions.")
        k = None if k is None else _rotate(op, views, k, positions, op.rotary_first)
        if q_out is not None:
            rotated = _rotate(op, views, views["q"], positions, 0 if op.q_rope else op.rotary_first)
            q_out[positions >= 0] = rotated[positions >= 0]
    pages, at = slots[written] // size, slots[written] % size
    if isinstance(op.kv_element, Record) and k is not None:
        views["k_cache"][pages, at] = quantize(op.kv_element, k[written])
        return
    for name, x in (("k", k), ("v", views.get("v"))):
        if x is None:
            continue
        views[f"{name}_cache"][pages, at] = _store(op, views, name, x[written], owners[written])


def _store(op: Append, views: Views, name: str, x: Array, owners: Array) -> Array:
    """Returns what the cache holds for rows of k or v, (rows, kv_heads, columns)."""
    assert op.kv_element is not None
    if op.kv_element == op.element:
        return x
    scales, largest = views.get(f"{name}_scale"), op.kv_element.largest
    scale = np.asarray(getattr(op, f"{name}_scale"), np.float32) if scales is None else scales[owners]
    with np.errstate(all="ignore"):
        return np.clip(x.astype(np.float32) / scale, -largest, largest).astype(op.kv_element.dtype)


def _rotate(op: Append, views: Views, x: Array, positions: Array, first: int) -> Array:
    """x, (..., heads, columns), rotated from a column on by its rows' positions, in float32, or float64."""
    number, half, last = op.element.lse_dtype, first + op.rotary_dim // 2, first + op.rotary_dim
    cos, sin = (views[name][np.maximum(positions, 0)][..., None, :].astype(number) for name in ("cos", "sin"))
    neox, interleaved = (slice(first, half), slice(half, last)), (slice(first, last, 2), slice(first + 1, last, 2))
    pairs = neox if op.rotary == "neox" else interleaved
    result = x.copy()
    a, b = (x[..., columns].astype(number) for columns in pairs)
    with np.errstate(all="ignore"):
        result[..., pairs[0]], result[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
    return result


def combine(op: Combine, views: Views) -> None:
    """Merges the parts, in their order, into o and lse."""
    number, o = op.element.lse_dtype, views["o_0" if op.in_place else "o"]
    parts = [(views[f"o_{i}"].astype(number), views[f"lse_{i}"]) for i in range(op.count)]
    with np.errstate(all="ignore"):
        logits = [lse for _, lse in parts] + ([np.broadcast_to(views["sinks"][:, None], parts[0][1].shape)] if op.sinks else [])
        top = functools.reduce(np.maximum, logits)
        weights = [np.where(x == top, np.where(x == -np.inf, 0, 1), np.exp(x - top)).astype(number) for x in logits]
        total = functools.reduce(np.add, weights)
        weighted = np.zeros(o.shape, number)
        for (part, lse), weight in zip(parts, weights, strict=False):
            rows = np.swapaxes(lse, -1, -2)[..., None] != -np.inf
            weighted += np.where(rows, part * np.swapaxes(weight, -1, -2)[..., None], 0)
        divisor = np.swapaxes(np.where(total == 0, 1, total), -1, -2)[..., None]
        views["lse"][...] = np.where(total == 0, -np.inf, top + np.log(total))
    o[...] = weighted / divisor
