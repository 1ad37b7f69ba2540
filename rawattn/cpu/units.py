"""This module says how the work of a call on the CPU is cut into units, which threads compute, and where sequences lie.

A unit of the forward is one sequence, one head of k and v, and some queries of all heads that share it; one of the backward has
some keys and all queries. How they are cut does not depend on the threads.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import ProblemError
from ..variant.mask import FirstQueries, Pairs, of_head, of_sequence

Array = npt.NDArray[Any]
# The columns of a unit of work, a row of integers: some rows of a query tile, and their keys.
BATCH, ROW, QUERIES = 0, 1, 2  # of q and what lies as it does: its number in the batch, its first row, how many there are
PAGE, KEY, KEYS, KV_HEAD = 3, 4, 5, 6  # of k and v: their first page or number in the batch, the first row, how many there are
BOUNDS = 7  # where the first and last keys of its rows are in the arrays of these
SEQUENCE, HEAD, QUERY, POSITION = 8, 9, 10, 11  # for dropout: numbers of the sequence, of its first head, query and key
BEFORE, BEHIND = 12, 13  # rows beside those of the unit, whose gradients it makes 0
FIELDS = 14

KEYS_PER_UNIT = 1024  # of a backward, at least: each unit brings in all queries anew


def _ends(name: str, cu_seqlens: Array, rows: int) -> list[int]:
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > rows:
        raise ProblemError(f"{name} is {ends}; it must start with 0, never fall, and end with the {rows} rows or before.")
    return ends


def sequences_of(q: Array, k: Array, cu_seqlens_q: Array | None, cu_seqlens_kv: Array | None) -> list[tuple[Any, Any, Any]]:
    """Returns the place of each sequence: its rows of q, its rows of k, and its rows of lse."""
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        return [(i, i, i) for i in range(len(q))]
    q_ends, kv_ends = _ends("cu_seqlens_q", cu_seqlens_q, len(q)), _ends("cu_seqlens_kv", cu_seqlens_kv, len(k))
    sequences = []
    for i in range(len(q_ends) - 1):
        rows = slice(q_ends[i], q_ends[i + 1])
        sequences.append((rows, slice(kv_ends[i], kv_ends[i + 1]), (slice(None), rows)))
    return sequences


def key_bounds(mask: Pairs, heads: int, q_len: int, kv_len: int) -> tuple[Array, Array]:
    """First and one past the last key that each query of each head keeps, (q_len, heads)."""
    queries = np.arange(q_len)
    if mask.of_head is None:
        begin, end = (np.broadcast_to(bound[:, None], (q_len, heads)) for bound in mask.interval(queries, q_len, kv_len))
        return begin, end
    begins, ends = zip(*(of_head(mask, head).interval(queries, q_len, kv_len) for head in range(heads)), strict=True)
    return np.stack(begins, 1), np.stack(ends, 1)


class Units(NamedTuple):
    """Units as the loops take them (``lanes.FIELDS``), about what each costs, and the keys that their rows keep."""

    table: Array
    costs: Array
    begin: Array
    end: Array

    def chunks(self, threads: int) -> list[Array]:
        """The units in some runs of about the same cost, the longest units first, so that the threads end together."""
        if threads == 1 or len(self.table) < 2:
            return [self.table]
        order = np.argsort(-self.costs, kind="stable")
        sums = np.cumsum(self.costs[order])
        shares = (sums - 1) * (threads * CHUNKS_PER_THREAD) // max(1, sums[-1])
        return np.split(self.table[order], np.flatnonzero(np.diff(shares)) + 1)


CHUNKS_PER_THREAD = 8  # of units, which one call of the loops computes


def _flatten(bounds: tuple[Array, Array], kv_heads: int) -> tuple[Array, Array, int]:
    """First and last keys of (queries, heads) in the order of the loops' rows, one head of k and v after the other; and how many
    there are of each such head, 0 where all have the same."""
    queries, heads = bounds[0].shape
    if all(bound.strides[1] == 0 for bound in bounds):
        bounds, kv_heads, heads = tuple(bound[:, : heads // kv_heads] for bound in bounds), 1, heads // kv_heads  # type: ignore[assignment]
    shape = queries, kv_heads, heads // max(1, kv_heads)
    begin, end = (np.ascontiguousarray(x.reshape(shape).transpose(1, 0, 2), np.int64).ravel() for x in bounds)
    return begin, end, 0 if kv_heads == 1 else queries * shape[2]


def sequence_units(bounds: tuple[Array, Array], kv_heads: int, step: int, kv_len: int) -> Units:
    """The units of a forward of one sequence, of which each has ``step`` queries, for a sequence of number 0 in its arrays."""
    (q_len, heads), (begin, end, of_head) = bounds[0].shape, _flatten(bounds, kv_heads)
    first, head = (x.ravel() for x in np.meshgrid(np.arange(0, q_len, step), np.arange(kv_heads), indexing="ij"))
    table, last, group = np.zeros((len(first), FIELDS), np.int64), np.minimum(first + step, q_len), heads // max(1, kv_heads)
    table[:, ROW], table[:, QUERY], table[:, QUERIES], table[:, KEYS] = first, first, last - first, kv_len
    table[:, KV_HEAD], table[:, HEAD], table[:, BOUNDS] = head, head * group, head * of_head + first * group
    visits = (bounds[1][last - 1] - bounds[0][first]).max(1, initial=0)
    return Units(table, np.maximum(visits, 0) * (last - first) + 1, begin, end)


def join_units(each: list[Units], places: list[tuple[int, int, int, int, int]]) -> Units:
    """The units of several sequences, given for each its number in the batch and first row of q, the place of its first page and
    first row of k, and its number among all."""
    if not each:
        return Units(np.zeros((0, 1), np.int64), *[np.zeros(0, np.int64)] * 3)
    counts = [len(units.table) for units in each]
    first_bounds = np.cumsum([0, *[len(units.begin) for units in each[:-1]]])
    table = np.concatenate([units.table for units in each])
    columns = [BATCH, ROW, PAGE, KEY, SEQUENCE, BOUNDS]
    table[:, columns] += np.repeat(np.column_stack([np.array(places, np.int64), first_bounds]), counts, axis=0)
    return Units(table, *(np.concatenate([units[i] for units in each]) for i in range(1, 4)))


@functools.lru_cache(maxsize=32)
def dense_units(mask: Pairs, heads: int, kv_heads: int, step: int, batch: int, q_len: int, kv_len: int) -> Units:
    """The units of a forward of sequences of one length."""
    units = sequence_units(key_bounds(mask, heads, q_len, kv_len), kv_heads, step, kv_len)
    return _copy_units(units, batch)


def _copy_units(units: Units, batch: int) -> Units:
    """The units of the first sequence of a batch for all its sequences."""
    table, numbers = np.tile(units.table, (batch, 1)), np.repeat(np.arange(batch), len(units.table))
    table[:, BATCH] = table[:, PAGE] = table[:, SEQUENCE] = numbers
    return units._replace(table=table, costs=np.tile(units.costs, batch))


def ragged_units(
    places: list[tuple[Any, Any, Any]], mask: Pairs, heads: int, kv_heads: int, step: int, q: Array, k: Array,
    q_lens: Array | None, kv_lens: Array | None,
) -> Units:  # fmt: skip
    """The units of a forward of sequences of any lengths."""

    @functools.cache
    def units(used: int, q_len: int, kv_len: int, batch: int) -> Units:
        own = of_sequence(mask, batch)
        used_mask = own if used == q_len else FirstQueries(own, used)
        return sequence_units(key_bounds(used_mask, heads, q_len, kv_len), kv_heads, step, kv_len)

    each = []
    for i, (rows, keys, _) in enumerate(places):
        q_len, kv_len = len(q[rows]), len(k[keys]) if kv_lens is None else int(kv_lens[i])
        each.append(units(q_len if q_lens is None else int(q_lens[i]), q_len, kv_len, 0 if mask.of_sequence is None else i))
    return join_units(each, [place_of(i, rows, keys) for i, (rows, keys, _) in enumerate(places)])


def place_of(i: int, rows: Any, keys: Any) -> tuple[int, int, int, int, int]:
    """Says for ``join_units`` where the sequence i lies."""
    return (0, rows.start, 0, keys.start, i) if isinstance(rows, slice) else (i, 0, i, 0, i)


SMALL = 1 << 14  # rows of a sequence or units of a call, up to which what follows from lengths alone is kept for the next call


def isolate(unit: Array) -> tuple[int, slice, int, Array]:
    """Returns a unit's number in the batch, its rows and its head of k, and the unit in arrays of these alone."""
    batch, first, count, kv_head = (int(unit[i]) for i in (BATCH, ROW, QUERIES, KV_HEAD))
    alone = unit.copy()
    alone[[BATCH, ROW, KV_HEAD]] = 0
    return batch, slice(first, first + count), kv_head, alone[None]


def isolate_keys(unit: Array) -> tuple[tuple[int, slice, int], tuple[int, slice], slice, Array]:
    """Returns a unit's number in the batch, its rows and its head of k; the page and the rows of its keys; the rows of q whose
    gradients it writes; and the unit in arrays of its own rows and keys alone."""
    batch, rows, kv_head, alone = isolate(unit)
    page, first, count, before, behind = (int(unit[i]) for i in (PAGE, KEY, KEYS, BEFORE, BEHIND))
    alone[:, [PAGE, KEY, BEFORE, BEHIND]] = 0
    return (batch, rows, kv_head), (page, slice(first, first + count)), slice(rows.start - before, rows.stop + behind), alone


@functools.lru_cache(maxsize=32)
def dense_key_units(mask: Pairs, heads: int, kv_heads: int, batch: int, q_len: int, kv_len: int) -> Units:
    """The units of a backward of sequences of one length, each with all keys of a head."""
    return _copy_units(key_units(mask, heads, kv_heads, 1, q_len, kv_len)[0], batch)


def key_units(mask: Pairs, heads: int, kv_heads: int, cuts: int, q_len: int, kv_len: int) -> list[Units]:
    """The units of a backward of one sequence, for each run of its keys; what they cost are the pairs that count."""
    begin, end, of_head = _flatten(key_bounds(mask, heads, q_len, kv_len), kv_heads)
    group, units = heads // max(1, kv_heads), []
    for span in spans_of(kv_len, cuts):
        keys = span.stop - span.start
        own_begin, own_end = np.maximum(begin - span.start, 0), np.minimum(end - span.start, keys)
        counts = np.maximum(own_end - own_begin, 0).reshape(len(begin) // max(1, q_len * group), q_len, group).sum(2)
        table, costs = np.zeros((kv_heads, FIELDS), np.int64), np.zeros(kv_heads, np.int64)
        table[:, KEY], table[:, POSITION], table[:, KEYS] = span.start, span.start, keys
        for h in range(kv_heads):
            pairs = counts[h if of_head else 0] if q_len else counts[:0]
            touched = np.flatnonzero(pairs)  # the queries that keep any of these keys
            start, stop = (int(touched[0]), int(touched[-1]) + 1) if len(touched) else (0, 0)
            columns = {ROW: start, QUERY: start, QUERIES: stop - start, BEFORE: start, BEHIND: q_len - stop, KV_HEAD: h}
            columns |= {HEAD: h * group, BOUNDS: h * of_head + start * group}
            table[h, list(columns)], costs[h] = list(columns.values()), pairs.sum()
        units.append(Units(table, costs, own_begin, own_end))
    return units


def spans_of(kv_len: int, cuts: int) -> list[slice]:
    """The keys of a sequence in runs, one for each unit."""
    count = max(1, min(cuts, kv_len // KEYS_PER_UNIT))
    ends = [kv_len * i // count for i in range(count + 1)]
    return [slice(*ends[i : i + 2]) for i in range(count)]
