"""Blocked attention with an online softmax, on all cores.

Threads take units off a list, and ``lanes.attend`` computes one without the GIL. A unit's result depends on its own rows and keys
alone, so it is the same bits whatever the threads do.

The loops know the logits of ``Scale`` and ``Softcap``. With any other ``logit`` a unit is computed by the reference's array
operations, in the format that is computed with: right for every score, but several times slower, and its products are those of
NumPy's BLAS, whose bits may depend on the threads that it takes. Python functions are computed so, too.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..reference.formula import Dropped, Formula
from ..variant.element import Element
from ..variant.mask import FirstQueries, Pairs, of_sequence
from ..variant.score import Score
from .loops import cap_of, dropout_of, element_of, in_threads, load, storage_of, table_of
from .units import SMALL, Array, Units, dense_units, isolate, join_units, key_bounds, ragged_units, sequence_units, sequences_of


@dataclasses.dataclass(frozen=True)
class CpuConfig:
    """Rows of a unit (queries times heads that share k and v), keys of a step, threads."""

    tile_q: int = 256
    tile_kv: int = 96
    threads: int = 1


def undefined_reason(mask: Pairs) -> str | None:
    """The reason why nothing is computed by a mask of several runs of keys that does not say which; None for others."""
    if not mask.lists or mask.keep is not None:
        return None
    return f"it takes masks of several runs of keys with a definition in Python, keep(...), and {type(mask).__name__} has none"


def sink_logits_of(sinks: Array | None, heads: int, number: npt.DTypeLike) -> Array:
    return np.full(heads, -np.inf, number) if sinks is None else sinks.astype(number)


class Sequence(NamedTuple):
    """Arrays without their batch dimension, and which keys each query keeps. Key j is in row j % page_size of the page
    pages[j // page_size] of k and v, (pages, page_size, kv_heads, columns); an array of one sequence is a page."""

    batch: int
    q: Array
    k: Array
    v: Array
    pages: Array
    kv_len: int
    o: Array
    lse: Array | None  # (heads, q_len)
    mask: Pairs
    score: Score
    begin: Array  # (q_len, heads)
    end: Array


class _Unit(NamedTuple):
    """Some queries of a sequence, and the heads that share one head of k and v, for the formula."""

    sequence: Sequence
    kv_head: int
    queries: slice
    keys: int  # that it visits, more or less


class _Work(NamedTuple):
    """Arrays of four dimensions, and of lse three, of one or several sequences, and units of them."""

    q: Array
    k: Array
    v: Array
    pages: Array
    o: Array
    lse: Array
    units: Units


def run_forward(
    q: Array, k: Array, v: Array, o: Array, lse: Array | None, mask: Pairs, score: Score, scale: float,
    sinks: Array | None = None, cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None,
    q_lens: Array | None = None, kv_lens: Array | None = None, dropped: Dropped | None = None, *, config: CpuConfig,
    invariant: bool = False,
) -> None:  # fmt: skip
    """Computes attention of NumPy arrays as the reference's, writing o and lse in place. Last dimensions are contiguous.

    Raises ProblemError where cu_seqlens do not describe sequences of these arrays.
    """
    heads, kv_heads, cap = q.shape[-2], k.shape[-2], cap_of(mask, score)
    places = sequences_of(q, k, cu_seqlens_q, cu_seqlens_kv)
    if cap is not None:
        step, element = max(1, config.tile_q // (heads // kv_heads)), element_of(q)
        is_dense = cu_seqlens_q is None and q_lens is None and kv_lens is None and mask.of_sequence is None
        if is_dense and q.shape[-3] * heads <= SMALL and len(q) * kv_heads <= SMALL:
            units = dense_units(mask, heads, kv_heads, step, len(q), q.shape[1], k.shape[1])
        else:
            units = ragged_units(places, mask, heads, kv_heads, step, q, k, q_lens, kv_lens)
        pages = np.arange(max(1, len(k)), dtype=np.int32) if q.ndim == 4 else ONE_PAGE
        whole = _Work(batch_of(q), batch_of(k), batch_of(v), pages, batch_of(o), lse_batch_of(lse, element), units)
        return _run_loops([whole], cap, scale, sinks, config, dropped)
    sequences = sequences_alone(q, k, v, o, lse, mask, score, places, q_lens, kv_lens)
    run_sequences(sequences, heads, scale, sinks, config, dropped, invariant)


def sequences_alone(
    q: Array, k: Array, v: Array, o: Array, lse: Array | None, mask: Pairs, score: Score, places: list[tuple[Any, Any, Any]],
    q_lens: Array | None, kv_lens: Array | None,
) -> list[Sequence]:  # fmt: skip
    """The sequences at these places, each alone."""
    sequences, bounds_of = [], functools.cache(key_bounds)
    for i, (rows, keys, at) in enumerate(places):
        q_len, kv_len, out = len(q[rows]), len(k[keys]), (o[rows], None if lse is None else lse[at])
        kv_len = kv_len if kv_lens is None else int(kv_lens[i])
        used = q_len if q_lens is None else int(q_lens[i])
        own_mask = of_sequence(mask, i)
        own_mask = own_mask if used == q_len else FirstQueries(own_mask, used)
        bounds, arrays = bounds_of(own_mask, q.shape[-2], q_len, kv_len), (q[rows], k[keys][None], v[keys][None])
        own_score = score.of_lengths(used, kv_len)
        sequences.append(Sequence(i, *arrays, ONE_PAGE, kv_len, *out, own_mask, own_score, *bounds))
    return sequences


def batch_of(x: Array) -> Array:
    """An array of four dimensions; packed sequences are one in a batch."""
    return x if x.ndim == 4 else x[None]


def lse_batch_of(lse: Array | None, element: Element) -> Array:
    """lse or dlse of three dimensions; one without numbers for none."""
    if lse is None:
        return np.empty((0, 0, 0), element.lse_dtype)
    return lse if lse.ndim == 3 else lse[None]


ONE_PAGE = np.zeros(1, np.int32)


def run_sequences(
    sequences: list[Sequence], heads: int, scale: float, sinks: Array | None, config: CpuConfig, dropped: Dropped | None = None,
    invariant: bool = False,
) -> None:  # fmt: skip
    """Computes attention of sequences of one number format, each by its own mask, and by scores of one kind; where ``invariant``,
    and the loops do not know a function, row by row, as the bits of products follow from how many rows they have."""
    if not sequences:
        return
    kv_heads, element = sequences[0].k.shape[-2], element_of(sequences[0].q)
    step, cap = max(1, config.tile_q // (heads // kv_heads)), cap_of(sequences[0].mask, sequences[0].score)
    if cap is not None:
        works = []
        for x in sequences:
            each = sequence_units((x.begin, x.end), kv_heads, step, x.kv_len)
            units = join_units([each], [(0, 0, 0, 0, x.batch)])
            arrays = x.q[None], x.k, x.v, np.ascontiguousarray(x.pages), x.o[None], lse_batch_of(x.lse, element)
            works.append(_Work(*arrays, units))
        return _run_loops(works, cap, scale, sinks, config, dropped)
    step, formula_units = 1 if invariant else step, list[_Unit]()
    for x in sequences:
        for first in range(0, len(x.q), step):
            last = min(first + step, len(x.q))
            visits = int((x.end[last - 1] - x.begin[first]).max())
            formula_units += [_Unit(x, kv_head, slice(first, last), visits) for kv_head in range(kv_heads)]
    formula_units.sort(key=lambda unit: -unit.keys)
    sink_logits = sink_logits_of(sinks, heads, element.lse_dtype)
    in_threads(config.threads, formula_units, functools.partial(_compute_by_formula, element, scale, dropped, sink_logits))


def _run_loops(
    works: list[_Work], cap: float, scale: float, sinks: Array | None, config: CpuConfig, dropped: Dropped | None
) -> None:
    """Computes units by the loops."""
    shares = [(work, chunk) for work in works for chunk in work.units.chunks(config.threads) if len(chunk)]
    if not shares:
        return
    element = element_of(works[0].q)
    factors = (dropout_of(dropped), scale / cap if cap else scale, cap, config.tile_kv, table_of(element))
    sink_logits = sink_logits_of(sinks, works[0].q.shape[2], element.lse_dtype)
    in_threads(config.threads, shares, functools.partial(_compute, element, load(element).loops, sink_logits, factors))


def _compute(element: Element, attend: Any, sinks: Array, factors: tuple[Any, ...], share: tuple[_Work, Array]) -> None:
    """Computes some units: all in one call, where arrays are in the format that is computed with."""
    work, table = share
    q, k, v, pages, o, lse, units = work
    storage, random, factors = storage_of(element), factors[0], factors[1:]
    if q.dtype == element.lse_dtype:
        attend(q, k, v, pages, table, units.begin, units.end, sinks, random, *factors, o, lse)
        return
    k, v, group = k.view(storage), v.view(storage), q.shape[2] // k.shape[2]
    for unit in table:
        batch, rows, kv_head, alone = isolate(unit)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        own_q, own_lse = q[batch, rows, heads].astype(element.lse_dtype)[None], lse[batch, heads, rows][None] if lse.size else lse
        own_o = np.empty((*own_q.shape[:3], v.shape[3]), element.lse_dtype)
        keys = k[:, :, kv_head, None], v[:, :, kv_head, None]
        arrays = own_q, *keys, pages, alone, units.begin, units.end, np.ascontiguousarray(sinks[heads])
        attend(*arrays, random, *factors, own_o, own_lse)
        o[batch, rows, heads] = own_o[0]


def formula_of(element: Element, mask: Pairs, score: Score, scale: float, dropped: Dropped | None = None) -> Formula:
    """The reference's, in the format that is computed with."""
    return Formula(np, {}, np.dtype(element.lse_dtype), lambda x: x, mask, score, scale, dropped)


def _gather(sequence: Sequence, x: Array, kv_head: int) -> Array:
    """A head's keys or values of a sequence in order, (kv_len, 1, columns); those that no query keeps are zeros if they are
    several pages."""
    if sequence.kv_len <= x.shape[1] and x.shape[0] == 1:
        return x[0, : sequence.kv_len, kv_head, None]
    some = sequence.begin < sequence.end
    kept = np.arange(sequence.begin[some].min(initial=sequence.kv_len), sequence.end[some].max(initial=0))
    result = np.zeros((sequence.kv_len, 1, x.shape[3]), x.dtype)
    result[kept, 0] = x[sequence.pages[kept // x.shape[1]], kept % x.shape[1], kv_head]
    return result


def _compute_by_formula(element: Element, scale: float, dropped: Dropped | None, sinks: Array, unit: _Unit) -> None:
    sequence, kv_head, queries, _ = unit
    formula = formula_of(element, sequence.mask, sequence.score, scale, dropped)
    group = len(sinks) // sequence.k.shape[2]
    heads, rows = slice(kv_head * group, (kv_head + 1) * group), np.arange(queries.start, queries.stop)
    q, k, v = sequence.q[:, heads], *(_gather(sequence, x, kv_head) for x in (sequence.k, sequence.v))
    lse = np.repeat(sinks[heads, None], len(sequence.q), axis=1)
    o, origin = sequence.o[:, heads], (sequence.batch, heads.start)
    o[queries] = 0
    with np.errstate(all="ignore"):
        formula.forward_sequence(origin, q, k, v, sinks[heads].tolist(), rows, rows, o, lse)
    if sequence.lse is not None:
        sequence.lse[heads, queries] = lse[:, queries]
