"""This module says who sends which rows of k and v to whom, and which attention calls a rank then makes, by pure functions of
numbers and a mask.

Every rank holds ``length`` rows of a sequence. In the layout "contiguous" rank r holds the r-th part of the sequence. In
"zigzag" the sequence has 2n chunks and rank r holds chunks r and 2n - 1 - r, one behind the other: under a causal mask all ranks
then keep the same number of pairs (the layout of context parallelism in arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..errors import ProblemError
from ..variant.mask import Ints, Pairs
from ..variant.offset import OffsetMask

LAYOUTS = ("zigzag", "contiguous")
Range = tuple[int, int]


class Span(NamedTuple):
    """Rows ``begin`` to ``end`` of a rank, which follow each other in the sequence from ``position`` on."""

    begin: int
    end: int
    position: int


class Task(NamedTuple):
    """An attention call: rows of q, rows of the keys at hand, whether the mask is needed, and offsets where it needs them."""

    q: Range
    kv: Range
    masked: bool
    offsets: Range | None


class Piece(NamedTuple):
    """Rows ``begin`` to ``end`` of a rank's k and v; they go to row ``at`` of the buffer of the rank that receives them."""

    peer: int
    begin: int
    end: int
    at: int


class RingStep(NamedTuple):
    """One step of a rank: it receives and sends pieces, and computes on a buffer of ``rows`` rows.

    ``copies`` are pieces of its own rows that belong in the buffer."""

    recvs: tuple[Piece, ...]
    sends: tuple[Piece, ...]
    copies: tuple[Piece, ...]
    rows: int
    tasks: tuple[Task, ...]


class Schedule(NamedTuple):
    """The calls on a rank's own keys, and the steps. All ranks have the same number of steps, and what one sends in a step
    another receives in the same step."""

    local: tuple[Task, ...]
    steps: tuple[RingStep, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All calls, in order."""
        return (*self.local, *(task for step in self.steps for task in step.tasks))


@dataclasses.dataclass(frozen=True)
class Whole:
    """The attention of whole sequences, of which ranks compute parts. ``masks`` has one mask, or one for each head where heads
    differ. Under a score that sees positions (``positional``) a call has rows of one span of q and one of k."""

    masks: tuple[Pairs, ...]
    positional: bool
    count: int
    q_len: int  # of a rank
    kv_len: int
    layout: str

    def spans(self, rank: int, length: int) -> tuple[Span, ...]:
        """Returns the rows of a rank."""
        if self.layout == "contiguous":
            return (Span(0, length, rank * length),)
        half = length // 2
        return Span(0, half, rank * half), Span(half, length, (2 * self.count - 1 - rank) * half)

    def kept(self, mask: Pairs, q: tuple[Span, ...], kv: Span) -> tuple[Ints, Ints]:
        """Returns the rows of ``kv`` that each row of q keeps, as begin and end; both are kv.begin where there is none."""
        rows = np.concatenate([np.arange(span.position, span.position + span.end - span.begin) for span in q])
        begin, end = mask.interval(rows, self.count * self.q_len, self.count * self.kv_len)
        return _clip_intervals(begin - kv.position + kv.begin, end - kv.position + kv.begin, kv)


def _clip_intervals(begin: Ints, end: Ints, span: Span) -> tuple[Ints, Ints]:
    begin, end = np.clip(begin, span.begin, span.end), np.clip(end, span.begin, span.end)
    return np.where(begin < end, begin, span.begin), np.where(begin < end, end, span.begin)


def _clip(spans: tuple[Span, ...], begin: int, end: int) -> tuple[Span, ...]:
    """Returns the spans' rows from ``begin`` to ``end``."""
    clipped = []
    for span in spans:
        a, b = max(span.begin, begin), min(span.end, end)
        if a < b:
            clipped.append(Span(a, b, span.position + a - span.begin))
    return tuple(clipped)


def tasks(whole: Whole, q: tuple[Span, ...], kv: tuple[Span, ...]) -> tuple[Task, ...]:
    """Returns the fewest calls that compute the kept pairs of these spans: one where one can, else one for each span."""
    if not q or not kv:
        return ()
    kept = [[whole.kept(mask, q, span) for span in kv] for mask in whole.masks]
    used = functools.reduce(np.logical_or, (begin < end for intervals in kept for begin, end in intervals))
    if not used.any():
        return ()
    runs = [(begin[begin < end].min(), end.max()) for intervals in kept for begin, end in intervals if (begin < end).any()]
    rows = np.concatenate([np.arange(span.begin, span.end) for span in q])[used]
    q_used = _clip(q, int(rows[0]), int(rows[-1]) + 1)
    kv_used = _clip(kv, int(min(a for a, _ in runs)), int(max(b for _, b in runs)))
    if (q_used, kv_used) != (q, kv):  # rows that keep nothing, and keys that nobody keeps, need no call
        return tasks(whole, q_used, kv_used)
    single = len(q) == len(kv) == 1
    if single or not whole.positional:
        task = _make_task(whole, q, kv, kept)
        if task is not None:
            return (task,)
    if single:
        remedy = "write it as a function, mask=lambda q, kv: ..., with lengths as numbers"
        raise ProblemError(
            f"mask is {whole.masks[0]}; no offsets of rawattn.attention place it on parts of these sequences; {remedy}."
        )
    if len(q) > 1:
        return tuple(task for span in q for task in tasks(whole, (span,), kv))
    return tuple(task for span in kv for task in tasks(whole, q, (span,)))


def _make_task(whole: Whole, q: tuple[Span, ...], kv: tuple[Span, ...], kept: list[list[tuple[Ints, Ints]]]) -> Task | None:
    """Returns one call on all rows of these spans that keeps just ``kept``; None where there is none."""
    q_range, kv_range = (q[0].begin, q[-1].end), (kv[0].begin, kv[-1].end)
    q_len, kv_len, at = q_range[1] - q_range[0], kv_range[1] - kv_range[0], (q[0].position, kv[0].position)
    if all((b == s.begin).all() and (e == s.end).all() for intervals in kept for s, (b, e) in zip(kv, intervals, strict=True)):
        return Task(q_range, kv_range, False, at if whole.positional else None)
    shift = whole.count * (whole.kv_len - whole.q_len)  # of queries that stand at the last keys
    for offsets in (at,) if whole.positional else (None, at, (at[0] + max(shift, 0), at[1] + max(-shift, 0))):
        for mask, intervals in zip(whole.masks, kept, strict=True):
            placed = mask if offsets is None else OffsetMask(mask, *offsets)
            begin, end = placed.interval(np.arange(q_len), q_len, kv_len)
            within = [_clip_intervals(begin + kv_range[0], end + kv_range[0], span) for span in kv]
            if any((b != x).any() or (e != y).any() for (b, e), (x, y) in zip(within, intervals, strict=True)):
                break
        else:
            return Task(q_range, kv_range, True, offsets)
    return None


@functools.lru_cache(maxsize=256)
def ring(whole: Whole, rank: int) -> Schedule:
    """Returns the schedule of a rank that gets keys from rank after rank, the next lower one first, straight from their owner. So
    it receives only what it needs, and one buffer of a rank's keys is enough: of two ranks it is filled at once, of more by
    halves, one in use while the other is filled."""
    q, kv, count = whole.spans(rank, whole.q_len), whole.spans(rank, whole.kv_len), whole.count
    middle = -(-whole.kv_len // 2)
    blocks = [(0, whole.kv_len)] if count == 2 else [(0, middle), (middle, whole.kv_len)]
    steps = []
    for ahead in range(1, count):
        source, target = (rank - ahead) % count, (rank + ahead) % count
        for block in blocks:
            calls = tasks(whole, q, _clip(whole.spans(source, whole.kv_len), *block))
            begin, end = _span_keys(calls)
            theirs = _span_keys(tasks(whole, whole.spans(target, whole.q_len), _clip(kv, *block)))
            recvs = (Piece(source, begin, end, 0),) if calls else ()
            sends = (Piece(target, *theirs, 0),) if theirs[0] < theirs[1] else ()
            steps.append(RingStep(recvs, sends, (), end - begin, _move(calls, begin)))
    return Schedule(tasks(whole, q, kv), tuple(steps))


@functools.lru_cache(maxsize=256)
def all_gather(whole: Whole, rank: int) -> Schedule:
    """Returns the schedule of a rank in one step: it receives all the keys that it needs, in the order of their positions."""
    kv = (Span(0, whole.count * whole.kv_len, 0),)
    calls = [tasks(whole, whole.spans(receiver, whole.q_len), kv) for receiver in range(whole.count)]
    begin, end = _span_keys(calls[rank])
    recvs = [p for peer in range(whole.count) if peer != rank for p in _find_pieces(whole, peer, peer, (begin, end))]
    sends = [p for peer in range(whole.count) if peer != rank for p in _find_pieces(whole, rank, peer, _span_keys(calls[peer]))]
    copies = tuple(_find_pieces(whole, rank, rank, (begin, end)))
    return Schedule((), (RingStep(tuple(recvs), tuple(sends), copies, end - begin, _move(calls[rank], begin)),))


def _find_pieces(whole: Whole, owner: int, peer: int, needed: Range) -> Iterator[Piece]:
    """Gives the pieces of the owner's rows that are at the needed positions, to be sent to or received from ``peer``."""
    for begin, end, position in whole.spans(owner, whole.kv_len):
        first, last = max(needed[0], position), min(needed[1], position + end - begin)
        if first < last:
            yield Piece(peer, begin + first - position, begin + last - position, first - needed[0])


def _span_keys(calls: tuple[Task, ...]) -> Range:
    """Returns the keys that the calls need, from the first to the last one."""
    return (min(task.kv[0] for task in calls), max(task.kv[1] for task in calls)) if calls else (0, 0)


def _move(calls: tuple[Task, ...], by: int) -> tuple[Task, ...]:
    """Returns the calls on a buffer that begins with row ``by``."""
    return tuple(task._replace(kv=(task.kv[0] - by, task.kv[1] - by)) for task in calls)
