"""The gradients of attention, on all cores.

A unit has some keys and all queries, and owns dk and dv of its keys; where the keys of a head are in several units, each writes a
dq of its own, and these are added in order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from ..driver.device import cpu as this_cpu
from ..errors import UnsupportedError
from ..operation.keys import ListedKeys
from ..reference.formula import Dropped, Formula
from ..variant.mask import Pairs, of_sequence
from ..variant.score import Score
from .cost import backward_seconds, threads_for
from .forward import batch_of, formula_of, lse_batch_of, sink_logits_of
from .loops import cap_of, dropout_of, element_of, in_threads, load
from .units import SMALL, Array, Units, dense_key_units, isolate_keys, join_units, key_bounds, key_units, sequences_of, spans_of

BACKWARD_UNITS = 32  # of a backward, where there are keys enough
DELTA_IN_THREADS = 1 << 20  # numbers of o from which on threads that compute delta pay


class _Rows(NamedTuple):
    """Arrays of a backward, of one sequence and all heads."""

    number: int  # of the sequence
    token: int  # the number of its first row of q among those of all
    do: Array
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array  # (heads, q_len)
    dlse: Array | None
    delta: Array  # (heads, q_len), to be computed
    sinks: Array
    dsinks: Array
    dq: Array
    dk: Array
    dv: Array


class _KeyUnit(NamedTuple):
    """The gradients of one sequence and head of k and v, for the formula."""

    rows: _Rows  # of the query heads that share the head
    head: int  # the number of the first of these
    pairs: int


class _BackwardWork(NamedTuple):
    """Arrays of four dimensions, and of lse and dlse three, of one or several sequences, and units of them."""

    do: Array
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array
    dlse: Array
    units: Units
    dq: Array
    dk: Array
    dv: Array


def run_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, dq: Array, dk: Array, dv: Array, mask: Pairs, score: Score,
    scale: float, dlse: Array | None = None, sinks: Array | None = None, dsinks: Array | None = None,
    cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None, q_lens: Array | None = None,
    kv_lens: Array | None = None, dropped: Dropped | None = None, captured: dict[int, Array] | None = None,
    lists: ListedKeys | None = None, *, threads: int | None = None,
) -> None:  # fmt: skip
    """Computes the gradients of the reference's ``attention_backward`` from o and lse of the forward, on NumPy arrays, writing
    dq, dk, dv and dsinks in place. Rows of no sequence, and those that q_lens and kv_lens leave unused, get 0. ``captured``
    are the gradients of arrays that the score captured, by their numbers, which are written too, summed in float64 by one thread.
    Where queries have ``lists`` of keys, the formula computes all.

    ``threads`` are as many as pay unless given. Results are the same bits whatever their number, but for scores that the loops do
    not know. NaN or inf in a query, key or value may reach the gradients of rows that it is masked from.

    Raises ProblemError where cu_seqlens do not describe sequences of these arrays, UnsupportedError where the score has no slope.
    """
    if score.slope is None:
        raise UnsupportedError(f"the score {score!r} has no slope(...), its derivative by s, which gradients need.")
    if cu_seqlens_q is not None or q_lens is not None:
        dq[...] = 0
    if cu_seqlens_kv is not None or kv_lens is not None:
        dk[...], dv[...] = 0, 0
    element, cap = element_of(q), None if lists else cap_of(mask, score)
    inputs = batch_of(do), batch_of(q), batch_of(k), batch_of(v), batch_of(o)
    statistics = lse_batch_of(lse, element), lse_batch_of(dlse, element)
    work = _BackwardWork(*inputs, *statistics, join_units([], []), batch_of(dq), batch_of(dk), batch_of(dv))
    is_dense, rows = cu_seqlens_q is None and q_lens is None and kv_lens is None, list[_Rows]()
    if is_dense:
        spots = [(i, 0, q.shape[1], 0, k.shape[1]) for i in range(len(q))]
    else:
        spots = _find_spots(q, k, cu_seqlens_q, cu_seqlens_kv, q_lens, kv_lens)
    if cap is None or dsinks is not None:
        sink_parts = np.zeros((len(spots), q.shape[-2]), element.lse_dtype)
        rows = _make_rows(work, spots, sink_logits_of(sinks, q.shape[-2], element.lse_dtype), sink_parts)
        in_threads((threads or this_cpu().sm_count) if o.size >= DELTA_IN_THREADS else 1, rows, _compute_delta)
        if dsinks is not None:
            dsinks[...] = sink_parts.sum(0)
    if cap is None:
        formula = dataclasses.replace(formula_of(element, mask, score, scale, dropped), lists=lists)
        _run_by_formula(rows, formula, captured or {}, threads)
    else:
        factors = scale / cap if cap else scale, cap, scale
        _run_by_loops(work, spots, is_dense, mask, factors, dropped, threads)


_Spot = tuple[int, int, int, int, int]  # of a sequence: its number in the batch, the first row and the rows of q, and those of k


def _find_spots(
    q: Array, k: Array, cu_seqlens_q: Array | None, cu_seqlens_kv: Array | None, q_lens: Array | None, kv_lens: Array | None
) -> list[_Spot]:
    """Says where each sequence has its used rows."""
    spots = []
    for i, (rows, keys, _) in enumerate(sequences_of(q, k, cu_seqlens_q, cu_seqlens_kv)):
        n, m = (len(x) if lens is None else int(lens[i]) for x, lens in ((q[rows], q_lens), (k[keys], kv_lens)))
        spots.append((0, rows.start, n, keys.start, m) if isinstance(rows, slice) else (i, 0, n, 0, m))
    return spots


def _make_rows(x: _BackwardWork, spots: list[_Spot], sinks: Array, sink_parts: Array) -> list[_Rows]:
    """The arrays of each sequence, with a delta that is to be computed."""
    delta, rows = np.empty(x.lse.shape, x.lse.dtype), []
    for i, (batch, row, n, key, m) in enumerate(spots):
        q_rows, keys, at = (batch, slice(row, row + n)), (batch, slice(key, key + m)), (batch, slice(None), slice(row, row + n))
        statistics = x.lse[at], x.dlse[at] if x.dlse.size else None, delta[at], sinks, sink_parts[i]
        rows.append(
            _Rows(
                i,
                batch * x.q.shape[1] + row,
                x.do[q_rows],
                x.q[q_rows],
                x.k[keys],
                x.v[keys],
                x.o[q_rows],
                *statistics,
                x.dq[q_rows],
                x.dk[keys],
                x.dv[keys],
            )
        )
    return rows


def _run_by_formula(
    rows: list[_Rows], formula: Formula, captured: dict[int, Array], threads: int | None
) -> None:  # fmt: skip
    """Computes the gradients of sequences whose delta is known."""
    sums, units = {i: np.zeros(x.shape) for i, x in captured.items()}, list[_KeyUnit]()
    for x in rows:
        (kv_len, kv_heads), group = x.k.shape[:2], x.q.shape[1] // x.k.shape[1]
        begin, end = key_bounds(of_sequence(formula.mask, x.number), group * kv_heads, len(x.q), kv_len)
        for h in range(kv_heads):
            heads = slice(h * group, (h + 1) * group)
            inputs = x.do[:, heads], x.q[:, heads], x.k[:, h, None], x.v[:, h, None], x.o[:, heads]
            statistics = x.lse[heads], None if x.dlse is None else x.dlse[heads], x.delta[heads], x.sinks[heads], x.dsinks[heads]
            rows_of_head = _Rows(x.number, x.token, *inputs, *statistics, x.dq[:, heads], x.dk[:, h, None], x.dv[:, h, None])
            pairs = np.minimum(end[:, heads], kv_len) - np.maximum(begin[:, heads], 0)
            units.append(_KeyUnit(rows_of_head, heads.start, int(np.maximum(pairs, 0).sum())))
    units.sort(key=lambda unit: -unit.pairs)
    if threads is None and units:
        columns = units[0].rows.q.shape[-1] + units[0].rows.v.shape[-1]
        threads = threads_for(backward_seconds(sum(unit.pairs for unit in units), columns), this_cpu())
    formula = dataclasses.replace(formula, sums=sums)
    in_threads(1 if sums else threads or 1, units, functools.partial(_compute_by_formula, formula))  # one order of sums
    for i, gradient in captured.items():
        gradient[...] = sums[i]


def _run_by_loops(
    whole: _BackwardWork, spots: list[_Spot], is_dense: bool, mask: Pairs, factors: tuple[float, ...], dropped: Dropped | None,
    threads: int | None,
) -> None:  # fmt: skip
    """Computes the gradients of sequences."""
    works, parts = _make_works(whole, spots, is_dense, mask)
    if threads is None:
        pairs = sum(int(work.units.costs.sum()) for work in works)
        threads = threads_for(backward_seconds(pairs, whole.q.shape[-1] + whole.v.shape[-1]), this_cpu())
    shares = [(work, chunk) for work in works for chunk in work.units.chunks(threads) if len(chunk)]
    if shares:
        loops = load(element_of(whole.q), "backward").loops
        in_threads(threads, shares, functools.partial(_compute, loops, dropout_of(dropped), factors))
    if parts:
        in_threads(threads, parts, _add_parts)


def _make_works(
    whole: _BackwardWork, spots: list[_Spot], is_dense: bool, mask: Pairs
) -> tuple[list[_BackwardWork], list[tuple[Array, Array]]]:
    """The units of a backward; and, of each head of sequences whose keys are in several units, dq and what they add to it."""
    (batch, q_len, heads), (kv_len, kv_heads) = whole.q.shape[:3], whole.k.shape[1:3]
    cuts = max(1, BACKWARD_UNITS // max(1, len(spots) * kv_heads))
    if (
        is_dense
        and mask.of_sequence is None
        and len(spans_of(kv_len, cuts)) == 1
        and q_len * heads <= SMALL
        and batch * kv_heads <= SMALL
    ):
        return [whole._replace(units=dense_key_units(mask, heads, kv_heads, batch, q_len, kv_len))], []

    @functools.cache
    def units_of(number: int, n: int, keys: int) -> list[Units]:
        return key_units(of_sequence(mask, number), heads, kv_heads, cuts, n, keys)

    each = [(i, spot, units_of(0 if mask.of_sequence is None else i, spot[2], spot[4])) for i, spot in enumerate(spots)]
    uncut = [(spans[0], (spot[0], spot[1], spot[0], spot[3], i)) for i, spot, spans in each if len(spans) == 1]
    works, sums = [whole._replace(units=join_units([units for units, _ in uncut], [at for _, at in uncut]))], []
    for i, (number, row, n, key, _), spans in each:
        if len(spans) > 1:
            q_rows, at = (
                (slice(number, number + 1), slice(row, row + n)),
                (slice(number, number + 1), slice(None), slice(row, row + n)),
            )
            of_rows = {name: getattr(whole, name)[q_rows] for name in ("do", "q", "o")}
            statistics = {"lse": whole.lse[at], "dlse": whole.dlse[at]}
            parts = np.empty((len(spans), *of_rows["q"].shape), whole.lse.dtype)
            for units, dq in zip(spans, parts, strict=True):
                joined = join_units([units], [(0, 0, number, key, i)])
                works.append(whole._replace(**of_rows, **statistics, dq=dq, units=joined))
            sums += [(whole.dq[q_rows][:, :, h], parts[:, :, :, h]) for h in range(heads)]
    return works, sums


def _compute_delta(x: _Rows) -> None:
    """Computes delta, and the gradients of the sinks from it."""
    number = x.delta.dtype
    x.delta[...] = np.einsum("qhd,qhd->hq", x.do.astype(number, copy=False), x.o.astype(number, copy=False))
    if x.dlse is not None:
        x.delta[...] -= x.dlse
    with np.errstate(all="ignore"):
        sinks = x.sinks[:, None]
        p = np.where(sinks == -np.inf, 0.0, np.where(x.lse == sinks, 1.0, np.exp(sinks - x.lse)))  # 1 where both are inf
    x.dsinks[...] = -(p * x.delta).sum(-1)


def _compute(loops: Any, random: Array, factors: tuple[float, ...], share: tuple[_BackwardWork, Array]) -> None:
    """Computes some units: all in one call, where arrays are in the format that is computed with."""
    x, table = share
    do, q, k, v, o, lse, dlse, (_, _, begin, end), dq, dk, dv = x
    if q.dtype == lse.dtype:
        loops(do, q, k, v, o, lse, dlse, table, begin, end, random, *factors, dq, dk, dv)
        return
    number, group = lse.dtype, q.shape[2] // k.shape[2]
    for unit in table:
        (batch, rows, kv_head), (page, rows_of_k), written, alone = isolate_keys(unit)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        q_rows, keys = (batch, rows, heads), (page, rows_of_k, slice(kv_head, kv_head + 1))
        inputs = [
            each[at][None].astype(number, copy=False)
            for each, at in ((do, q_rows), (q, q_rows), (k, keys), (v, keys), (o, q_rows))
        ]
        statistics = lse[batch, heads, rows][None], dlse[batch, heads, rows][None] if dlse.size else dlse
        gradients = [np.empty(inputs[i].shape, number) for i in (1, 2, 3)]
        loops(*inputs, *statistics, alone, begin, end, random, *factors, *gradients)
        dq[batch, written, heads] = 0
        for gradient, at, out in zip((dq, dk, dv), (q_rows, keys, keys), gradients, strict=True):
            gradient[at] = out[0]


def _compute_by_formula(formula: Formula, unit: _KeyUnit) -> None:
    x = unit.rows
    formula = dataclasses.replace(formula, mask=of_sequence(formula.mask, x.number))
    dq, dk, dv = (np.zeros(of.shape, x.delta.dtype) for of in (x.q, x.k, x.v))
    inputs = x.do, x.q, x.k, x.v, np.zeros_like(x.delta) if x.dlse is None else x.dlse, x.sinks.tolist()
    with np.errstate(all="ignore"):
        formula.backward_sequence((x.number, unit.head), *inputs, dq, dk, dv, np.zeros_like(x.sinks), (x.lse, x.delta), x.token)
    x.dq[...], x.dk[...], x.dv[...] = dq, dk, dv


def _add_parts(parts: tuple[Array, Array]) -> None:
    dq, added = parts
    dq[...] = added.sum(0)
