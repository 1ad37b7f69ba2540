"""Results of attention over different keys, merged as they come."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..serving.merge import merge_states
from ..variant.store import MOST_ARRAYS
from .schedule import Range, Task

FEW_RANKS = 4  # whose results wait for one merge: there are at most two of each query over a rank's keys
MOST_HELD = 4  # times the bytes of o, of results of more ranks and their sum together
HELD_BYTES = 256 << 20  # up to which results wait for one merge, however many there are: sums would be read and written besides


class _Partial(NamedTuple):
    """o and lse of some rows, over some of their keys."""

    rows: Range
    o: Any
    lse: Any


class PartialResults:
    """Results over different keys, each o and lse of some of the queries, in the order in which they are merged.

    Results wait as they are, and one merge takes them all, where there are up to ``FEW_RANKS`` ranks, or they take up to
    ``MOST_HELD`` times the bytes of o or ``HELD_BYTES``. Else they are added to a sum in float32 (float64 for fp64) whenever
    there is no room for the next one, so that with the sum they take up to ``MOST_HELD`` times the bytes of o, whatever their
    number. Which are added together follows from ``tasks`` alone.
    """

    def __init__(self, q: Any, v: Any, tasks: Iterable[Task], ranks: int) -> None:
        self._q, self._shape = q, (*q.shape[:3], v.shape[3])
        self._number = torch.promote_types(q.dtype, torch.float32)
        self._results: list[_Partial] = []
        self._sum: _Partial | None = None
        lengths = [task.q[1] - task.q[0] for task in tasks]
        row_bytes = q.shape[0] * q.shape[2] * v.shape[3] * q.element_size()
        most = max(MOST_HELD * q.shape[1], HELD_BYTES // row_bytes if row_bytes else 0)
        of_sum = self._number.itemsize // q.element_size()
        fits = ranks <= FEW_RANKS or sum(lengths) <= most
        self._room = sum(lengths) if fits else (MOST_HELD - of_sum) * q.shape[1]  # in rows

    def make_room(self, task: Task) -> None:
        """Makes room for a task's result, before that takes memory: adds the results up where they leave none."""
        held = sum(x.o.shape[1] for x in self._results)
        if self._results and (held + task.q[1] - task.q[0] > self._room or len(self._results) == MOST_ARRAYS - 1):
            self._add_up()

    def add(self, task: Task, result: tuple[Any, Any]) -> None:
        """Takes the result of a task, o and lse."""
        self._results.append(_Partial(task.q, *result))

    def merge(self, sinks: Any) -> tuple[Any, Any]:
        """Merges all results; returns o and lse over all their keys."""
        rows, results = (0, self._shape[1]), [*([self._sum] if self._sum else []), *self._results]
        if sinks is None and self._sum is None and len(results) == 1 and results[0].rows == rows:
            return results[0].o, results[0].lse
        o, lse = self._q.new_empty(self._shape), []
        for (begin, end), pairs in _group_by_rows(rows, results):
            lse.append(self._merge_rows(pairs, o[:, begin:end], sinks))
        return o, lse[0] if len(lse) == 1 else torch.cat(lse, -1)

    def _add_up(self) -> None:
        batch, length, heads, _ = self._shape
        if self._sum is None:
            o = self._q.new_empty(self._shape, dtype=self._number)
            lse = self._q.new_full((batch, heads, length), -torch.inf, dtype=self._number)  # then o may be anything
            self._sum = _Partial((0, length), o, lse)
        for (begin, end), pairs in _group_by_rows(self._sum.rows, self._results):
            if pairs:
                o, lse = self._sum.o[:, begin:end], self._sum.lse[..., begin:end]
                lse.copy_(merge_states([(o, lse), *pairs], out=o)[1])
        self._results = []

    def _merge_rows(self, pairs: list[tuple[Any, Any]], out: Any, sinks: Any) -> Any:
        if not pairs:  # no key is kept
            out.zero_()
            empty = out.new_full((out.shape[0], out.shape[2], out.shape[1]), -torch.inf, dtype=self._number)
            return empty if sinks is None else empty.copy_(sinks[:, None])
        if len(pairs) == 1 and sinks is None and self._sum is None:
            out.copy_(pairs[0][0])
            return pairs[0][1]
        return merge_states(pairs, sinks=sinks, out=out)[1]


def _group_by_rows(rows: Range, results: list[_Partial]) -> Iterator[tuple[Range, list[tuple[Any, Any]]]]:
    """Groups results by rows: gives runs of ``rows``, and for each the pairs (o, lse) of the results that have its rows."""
    for begin, end in itertools.pairwise(sorted({*rows, *(x for result in results for x in result.rows)})):
        covering = [(result, result.rows[0]) for result in results if result.rows[0] <= begin and end <= result.rows[1]]
        yield (begin, end), [(x.o[:, begin - a : end - a], x.lse[..., begin - a : end - a]) for x, a in covering]
