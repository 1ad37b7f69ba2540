"""Lists of keys on the CPU: the rows of each query's list are gathered, and the loops go along them as along any keys.

A unit is some queries of a sequence, one head of k and v, and all heads that share it. Threads gather and compute units, whose
results depend on their own rows and lists alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import numpy as np

from ..errors import ProblemError
from ..operation.keys import ListedKeys
from ..reference.formula import kept_places
from ..reference.records import dequantize
from ..variant.element import RECORDS, Element
from .forward import ONE_PAGE, CpuConfig, Sequence, _compute, _Work, formula_of, lse_batch_of, sink_logits_of
from .loops import NOTHING_DROPPED, cap_of, element_of, in_threads, load, table_of
from .units import BOUNDS, FIELDS, KEY, KEYS, QUERIES, ROW, Array, Units

GATHERED = 1 << 16  # keys of a unit, about


class ListedSequence(NamedTuple):
    """A sequence, whose ``begin`` and ``end`` say which of its queries are used, the number of its first row of q among those of
    all, and what its keys and values are multiplied by, (kv_heads, 1), where they have eight bits."""

    sequence: Sequence
    token: int
    scales: tuple[Any, Any] | None = None

    @classmethod
    def of(cls, sequence: Sequence, rows: Any, scales: tuple[Any, Any] | None = None) -> ListedSequence:
        """The sequence whose rows of q are these, or a number of the batch."""
        return cls(sequence, rows.start if isinstance(rows, slice) else rows * len(sequence.q), scales)


class _ListedUnit(NamedTuple):
    listed: ListedSequence
    kv_head: int
    queries: range


def run_lists(
    sequences: Several[ListedSequence], op: Any, keys: Array, counts: Array | None, sinks: Array | None, config: CpuConfig
) -> None:
    """Computes an operation's sequences, whose lists of keys are these. Raises ProblemError for a number that is no key."""
    units, most = [], op.keys.most * op.spec.keys.block_kv
    lists = ListedKeys(op.spec.keys, {"keys": keys} | ({} if counts is None else {"keys_counts": counts}), op.heads)
    for each in sequences:
        q, step = each.sequence.q, max(1, GATHERED // max(1, most))
        units += [
            _ListedUnit(each, kv_head, range(first, min(first + step, len(q))))
            for first in range(0, len(q), step)
            for kv_head in range(each.sequence.k.shape[2])
        ]
    in_threads(config.threads, units, functools.partial(_compute_unit, lists, op.scale, sinks, config))


def _compute_unit(lists: ListedKeys, scale: float, sinks: Array | None, config: CpuConfig, unit: _ListedUnit) -> None:
    """Computes the queries of a unit, by the loops where they know mask and score."""
    x, element = unit.listed.sequence, element_of(unit.listed.sequence.q)
    number, group = element.lse_dtype, x.q.shape[1] // x.k.shape[2]
    heads = slice(unit.kv_head * group, (unit.kv_head + 1) * group)
    logits = sink_logits_of(sinks, x.q.shape[1], number)[heads]
    cap, alike = cap_of(x.mask, x.score), x.mask.of_head is None and lists.shared_by(group)
    if cap is None or not alike:
        return _compute_by_formula(lists, scale, logits, unit, heads)
    places = [_find_places(lists, unit, query, heads.start) for query in unit.queries]
    ends = np.cumsum([0, *map(len, places)])
    k, v = _gather(unit, np.concatenate(places))
    table = np.zeros((len(places), FIELDS), np.int64)
    table[:, ROW], table[:, QUERIES], table[:, KEY] = np.arange(len(places)), 1, ends[:-1]
    table[:, KEYS], table[:, BOUNDS] = np.diff(ends), np.arange(len(places)) * group
    bounds = np.repeat(np.diff(ends), group)
    rows = slice(unit.queries.start, unit.queries.stop)
    lse = lse_batch_of(None if x.lse is None else x.lse[heads, rows], element)
    is_widened = unit.listed.scales is not None
    q = x.q[rows, heads].astype(number) if is_widened else x.q[rows, heads]
    o = np.empty((*q.shape[:2], v.shape[-1]), number) if is_widened else x.o[rows, heads]
    work = _Work(q[None], k[None], v[None], ONE_PAGE, o[None], lse, Units(table, bounds, np.zeros_like(bounds), bounds))
    computed: Element = element_of(q)
    factors = (NOTHING_DROPPED, scale / cap if cap else scale, cap, config.tile_kv, table_of(computed))
    with np.errstate(all="ignore"):
        _compute(computed, load(computed).loops, np.ascontiguousarray(logits), factors, (work, table))
    if is_widened:
        x.o[rows, heads] = o


def _find_places(lists: ListedKeys, unit: _ListedUnit, query: int, head: int) -> Array:
    """The keys that a query attends to, in order."""
    x = unit.listed.sequence
    if x.begin[query, head] >= x.end[query, head]:  # it keeps none, or is not used
        return np.zeros(0, np.int64)
    places = lists.of(x.batch, unit.listed.token + query, query, head, x.kv_len)
    kept: Array = kept_places(np, x.mask, (x.batch, head), query, places, (len(x.q), x.kv_len))
    return kept


def _gather(unit: _ListedUnit, places: Array) -> tuple[Array, Array]:
    """The keys and values of these places, (keys, 1, columns)."""
    x, size = unit.listed.sequence, unit.listed.sequence.k.shape[1]
    pages, rows = x.pages[places // size], places % size
    if ((pages < 0) | (pages >= len(x.k))).any():
        wrong = int(np.argmax((pages < 0) | (pages >= len(x.k))))
        need = f"it must be a page of the cache, from 0 to {len(x.k) - 1}"
        raise ProblemError(f"sequence {x.batch} has page {pages[wrong]} for key {places[wrong]}, which is listed; {need}.")
    if x.k.dtype == np.uint8:
        record = RECORDS[x.k.shape[-1]]
        k = dequantize(record, x.k[pages, rows], element_of(x.q).lse_dtype)
        return k, k[..., : record.head_dim_v]
    k, v = (array[pages, rows, unit.kv_head, None] for array in (x.k, x.v))
    if unit.listed.scales is None:
        return k, v
    number = element_of(x.q).lse_dtype
    factors = [each[unit.kv_head] for each in unit.listed.scales]
    return k.astype(number) * factors[0], v.astype(number) * factors[1]


def _compute_by_formula(lists: ListedKeys, scale: float, logits: Array, unit: _ListedUnit, heads: slice) -> None:
    """Computes the queries of a unit by the reference's array operations."""
    x = unit.listed.sequence
    element = element_of(x.q)
    formula = formula_of(element, x.mask, x.score, scale)
    for query in unit.queries:
        for head, sink in zip(range(heads.start, heads.stop), logits.tolist(), strict=True):
            places = _find_places(lists, unit, query, head)
            k, v = _gather(unit, places)
            with np.errstate(all="ignore"):
                lengths = len(x.q), x.kv_len
                o, lse = formula.attend_listed(x.q[query, head], k[:, 0], v[:, 0], sink, (x.batch, head), query, places, lengths)
            x.o[query, head] = o
            if x.lse is not None:
                x.lse[head, query] = lse
