"""Attention over a sequence that is split over ranks."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..api import attention
from ..array import making, reading
from ..array.eager import eager
from ..array.forms import forms_of
from ..errors import ProblemError, RawattnError
from ..operation import Forward, arguments, captures, functions
from ..operation.forward import check_arrays
from ..operation.functions import BoundFunction, Function
from ..operation.spec import MaskLike, Options, ScoreLike, Spec, Window
from ..runtime.call_cache import cache_put
from ..runtime.request import request_for
from ..torch.autograd import NO_SECOND
from ..trace.proofs import Limits
from ..variant.mask import Full
from ..variant.score import Scale, Softcap
from . import schedule
from .layout import check_layout, group_of
from .partial import PartialResults
from .schedule import Piece, RingStep, Schedule, Task, Whole

METHODS = ("auto", "ring", "all_gather")
GATHERED_BYTES = 8 << 20  # of a rank's k and v, up to which "auto" gathers: a transfer then takes less than a step's launches
# Clocks that an attention kernel waits for NCCL's to start. Its blocks, one for each multiprocessor, stay until it ends and leave
# no room for NCCL's: what started later would be hidden behind nothing.
HEAD_START = 12_000


@eager
@arguments.named
def context_attention(
    q: Any, k: Any, v: Any, group: Any = None, *, causal: bool = False, window: Window | None = None,
    softcap: float | None = None, scale: float | None = None, mask: MaskLike | None = None, score: ScoreLike | None = None,
    alibi: Any = None, bias: Any = None, sinks: Any = None, layout: str = "zigzag", method: str = "auto",
    return_lse: bool = False, deterministic: bool = True,
) -> Any:  # fmt: skip
    """``rawattn.attention`` over sequences that are split over the ranks of a group: each has rows of q, k and v, and gets its
    rows of o.

    >>> q, k, v = (rawattn.parallel.split(x, mesh["cp"]) for x in (q, k, v))
    >>> o = rawattn.parallel.context_attention(q, k, v, mesh["cp"], causal=True)  # (batch, length / n, heads, head_dim_v)

    Every rank makes the same calls in the same order, with tensors of the same shapes and dtype, and runs the backward where one
    does: a rank that is missing leaves the others waiting. The group's backend is NCCL for CUDA tensors, and gloo for the CPU's.

    Args:
        q: (batch, q_len / n, heads, head_dim), this rank's rows; a torch tensor. Packed ones: ``context_attention_varlen``.
        k: (batch, kv_len / n, kv_heads, head_dim), this rank's rows; copied where it is not contiguous.
        v: (batch, kv_len / n, kv_heads, head_dim_v); likewise.
        group: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes.
        causal, window, softcap, scale, mask, score, alibi, bias: as in ``attention``, of the whole sequences. Functions see
            positions and lengths in these. What they captured is whole on each rank, and the same; the gradient of an array
            that a score captured is that of this rank's queries, and its sum over the ranks is the array's.
        sinks: (heads,), the same on all ranks. Its gradient is that of this rank's queries.
        layout: "zigzag", under which causal masks give all ranks the same work, or "contiguous"; see ``split``.
        method: "ring" receives the keys of the others one after the other and computes meanwhile; "all_gather" receives all
            that it needs at once, before it computes; "auto" takes the latter for k and v of up to 8 MiB a rank.
        return_lse: give (o, lse).
        deterministic: of the gradients, as in ``attention_backward``.

    Returns:
        o, (batch, q_len / n, heads, head_dim_v); with ``return_lse`` also lse, (batch, heads, q_len / n). Autograd follows both.

    Results over the keys of each rank are rounded to q's dtype, and merged in float32 (float64 for fp64) in an order that depends
    on ranks alone: the same inputs give the same bits on every run. A rank needs memory for one more k and v of its own (for n of
    them with "all_gather"), and for results up to four o's (eight without a causal mask on three or four ranks) or 256 MiB; the
    backward for gradients in float32 besides. What a mask lets nobody see is not sent, but for a function all is sent: kernels
    leave out its tiles. torch.compile leaves its graph for this call, and autocast casts nothing in it.

    Raises:
        ProblemError: an argument is wrong; the message names it and what is needed. UnsupportedError: no kernel computes it.

    The ring is that of arXiv 2310.01889, the gathered form and "zigzag" that of arXiv 2407.21783 (section 3.3.2), the merge and
    the gradients from a merged lse follow arXiv 2307.08691.
    """
    if alibi is not None or bias is not None:
        score, softcap = functions.biased(softcap, score, alibi, bias), None
    options: dict[str, Any] = {
        "causal": causal, "window": window, "softcap": softcap, "scale": scale, "mask": mask, "score": score,
        "return_lse": return_lse, "deterministic": deterministic,
    }  # fmt: skip
    group = group_of(group)
    taken, captured = captures.take(options)
    captures.find_followed(taken, captured)  # raises where a mask captured a tensor that requires grad
    found = _prepared(q, k, v, sinks, taken, captured, group, layout, method)
    if found is None:
        with torch.autocast(q.device.type, enabled=False):
            return attention.attention(q, k, v, sinks=sinks, **options)
    o, lse = _Context.apply(q, k, v, sinks, ContextCall(*found, group), *captured)
    return (o, lse) if return_lse else o


KEPT = 256  # specs and schedules of a group
_kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # by group


def _prepared(
    q: Any, k: Any, v: Any, sinks: Any, options: dict[str, Any], captured: tuple[Any, ...], group: Any, layout: Any, method: Any
) -> tuple[Spec, Schedule, Parts] | None:
    """The spec, the schedule and the functions of parts, which calls of a group share that have such tensors and options; None
    where a rank is alone.

    Raises ProblemError for wrong arguments: before anything is sent, since the other ranks would wait for the rest."""
    check_layout(layout)
    if method not in METHODS:
        raise ProblemError(f"method is {method!r}; it must be one of {', '.join(map(repr, METHODS))}.")
    with torch.no_grad():
        read = forms_of((q, k, v, sinks, *captured))
    request = request_for(Forward, Options(**options))
    key, kept = (request, read and read[0], layout, method), _kept.setdefault(group, {})
    found: tuple[Spec, Schedule, Parts] | None = kept.get(key)
    if found is not None:
        return found
    Spec.of(**functions.without(options))
    check_tensors(q, k, v, sinks, layout)
    count = dist.get_world_size(group)
    if count == 1:
        return None
    spec, own = of_parts(q, k, v, options, captured, count, q_len=q.shape[1] * count, kv_len=k.shape[1] * count)
    found = spec, _schedule(q, k, v, spec, group, layout, method), own
    if read is not None and request.is_kept:
        cache_put(kept, key, found, KEPT)
    return found


Parts = tuple[tuple[str, Function, tuple[int, ...]], ...]  # functions with their roles, and the numbers of what they captured


def of_parts(
    q: Any, k: Any, v: Any, options: dict[str, Any], captured: tuple[Any, ...], count: int, **given: int
) -> tuple[Spec, Parts]:
    """The spec of the whole, and its functions that are no built-in options: as ``functions.of_part`` gives them. Raises
    ProblemError where what they captured is not of the whole's sizes."""
    found = reading.read_named(Forward.names, (q, k, v)) | captures.read(options, captured)
    whole = Limits(q.shape[0], q.shape[2], q.shape[1] * count, k.shape[1] * count)
    spec = Spec.of(**captures.resolve(options, found, whole))
    own, first = [], 0
    for role, each in functions.among(options):
        part, indices = functions.of_part(each, **given)
        if getattr(spec, role).is_function:
            own.append((role, part, tuple(first + i for i in indices)))
        first += len(each.traced.labels)
    return spec, tuple(own)


def bound(own: Parts, captured: tuple[Any, ...]) -> dict[str, BoundFunction]:
    """The functions of parts with the arrays that they captured, by role."""
    return {role: BoundFunction(each.traced, [captured[i] for i in indices], each.numbers) for role, each, indices in own}


def check_tensors(q: Any, k: Any, v: Any, sinks: Any, layout: str) -> None:
    """Raises ProblemError where they are no parts of sequences in this layout."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or hasattr(x, "to_local"):
            raise ProblemError(f"{name} is a {type(x).__name__}; it must be a torch tensor, of a DTensor its to_local().")
        if x.dim() != 4:
            raise ProblemError(
                f"{name} has shape {tuple(x.shape)}; it must be (batch, rows, heads, head_dim). Packed sequences are "
                "for context_attention_varlen."
            )
        if not x.shape[1]:
            raise ProblemError(f"{name} has no rows on this rank; it must have one or more.")
        if layout == "zigzag" and x.shape[1] % 2:
            raise ProblemError(f"{name} has {x.shape[1]} rows on this rank; for layout='zigzag' it must be an even number.")
    check_arrays(reading.read_named(Forward.names, (q, k, v, None, None, sinks)), None, None)


def _schedule(q: Any, k: Any, v: Any, spec: Spec, group: Any, layout: str, method: str) -> Schedule:
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    if spec.mask.lists and not spec.mask.is_function:
        way = "give it as a function, or call head_attention: its interval does not say which keys are needed"
        raise ProblemError(f"mask is {spec.mask}, which keeps several runs of keys; {way}.")
    mask = Full() if spec.mask.is_function else spec.mask
    masks = (mask,) if mask.of_head is None else tuple(mask.of_head(head) for head in range(q.shape[2]))
    whole = Whole(masks, sees_positions(spec), count, q.shape[1], k.shape[1], layout)
    gathered = method == "all_gather" or (method == "auto" and k.nbytes + v.nbytes <= GATHERED_BYTES)
    return (schedule.all_gather if gathered else schedule.ring)(whole, rank)


def sees_positions(spec: Spec) -> bool:
    """Tells whether the score may depend on more than the logit, or the mask is a function, which may depend on all."""
    return type(spec.score) not in (Scale, Softcap) or spec.mask.is_function


@dataclasses.dataclass(frozen=True)
class ContextCall:
    """All of a call but its tensors."""

    spec: Spec
    schedule: Schedule
    functions: Parts
    group: Any

    def options(self, task: Task, captured: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the options of one of its attention calls."""
        q_offset, kv_offset = task.offsets or (None, None)
        mask = self.spec.mask if task.masked else None
        return {
            "mask": mask, "score": self.spec.score, "scale": self.spec.scale, "q_offset": q_offset, "kv_offset": kv_offset,
            "deterministic": self.spec.deterministic, **bound(self.functions, captured),
        }  # fmt: skip


# ---- what goes over the wire


_used: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose communicator is there


def _connect(group: Any, device: Any) -> None:
    """Makes the group's communicator. NCCL wants all ranks there for that, but not all send and receive in the first step."""
    if device.type == "cuda" and group not in _used:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _used.add(group)


Sent = list[tuple[int, Any]]  # pairs of a peer and (batch, rows, heads, columns), each batch contiguous


def _post(group: Any, sends: Sent, recvs: Sent) -> tuple[list[Any], list[Any]]:
    """Starts all transfers of a step at once, and gives what to wait for before received rows are read, and before sent rows
    change. Between two ranks the order is that of the lists, which is the same on both. A backend that is NCCL waits for the
    current stream before it starts, and ``wait`` makes the then current stream wait: no memory is given back or written
    meanwhile, as whoever posts keeps the tensors until then."""
    ops = [
        dist.P2POp(op, row, dist.get_global_rank(group, peer), group)
        for op, given in ((dist.irecv, recvs), (dist.isend, sends))
        for peer, x in given
        for row in x.unbind(0)
    ]
    works = dist.batch_isend_irecv(ops) if ops else []
    if len(works) < len(ops):  # one for all of them
        return (works, []) if recvs else ([], works)
    received = sum(len(x) for _, x in recvs)
    return works[:received], works[received:]


def _rows(x: Any, begin: int, end: int) -> Any:
    return x[:, begin:end]


class _Transfers:
    """The keys of the others, step by step, and the way back of their gradients.

    Every rank posts in one order: the keys of steps 0 and 1, then for each step s the keys of step s + 2 and the gradients of
    step s. A rank leaves out where it has nothing to do. What is posted waits only for what any rank posted before, so no rank
    waits for ever. Keys of a step go to one of two buffers, and there when the calls on its last contents are queued.

    It is a context. Where an attention call in it fails, on this rank alone perhaps, the rest is sent and received all the same,
    so that the others do not wait for ever and the next call finds nothing left: their gradients from here are NaN then.
    """

    def __init__(self, call: ContextCall, k: Any, v: Any, gradients: bool = False) -> None:
        self.group, self.steps, self.k, self.v = call.group, call.schedule.steps, k, v
        count = len(self.steps)
        self._order = [("keys", i) for i in range(min(2, count))]
        for i in range(count):
            self._order += [("keys", i + 2)] * (i + 2 < count) + [("gradients", i)] * gradients
        self._next, self._done = 0, -1  # index in _order; last step whose calls are queued
        self._has_gradients, self._in_use = gradients, None  # buffers of the step whose calls are being queued
        used = [step.rows for step in self.steps if step.rows]
        self._free = [self._buffers(max(used)) for _ in range(min(2, len(used)))]
        self._keys: dict[int, Any] = {}  # by step: buffers and what to wait for
        self._computed: dict[int, Any] = {}  # by step: gradients to send
        self._returned: deque[Any] = deque()  # posted gradients
        self._sent: list[Any] = []
        self._has_company = bool(call.schedule.local) and k.is_cuda  # products run meanwhile
        _connect(call.group, k.device)
        self._advance()

    def _buffers(self, rows: int) -> tuple[Any, Any]:
        return tuple(x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (self.k, self.v))

    def _advance(self) -> None:
        """Posts what can be posted."""
        before = self._next
        while self._next < len(self._order):
            what, i = self._order[self._next]
            if not (self._post_keys if what == "keys" else self._post_gradients)(i, self.steps[i]):
                break
            self._next += 1
        if self._has_company and any(self.steps[i].recvs or self.steps[i].sends for _, i in self._order[before : self._next]):
            torch.cuda._sleep(HEAD_START)

    def _post_keys(self, i: int, step: RingStep) -> bool:
        buffers = None
        if step.rows:
            if not self._free:
                return False
            buffers = self._free.pop(0)
        recvs = [(p.peer, _rows(x, p.at, p.at + p.end - p.begin)) for p in step.recvs for x in buffers or ()]
        sends = [(p.peer, _rows(x, p.begin, p.end)) for p in step.sends for x in (self.k, self.v)]
        received, sent = _post(self.group, sends, recvs)
        for p in step.own:
            for x, buffer in zip((self.k, self.v), buffers or (), strict=True):
                _rows(buffer, p.at, p.at + p.end - p.begin).copy_(_rows(x, p.begin, p.end))
        self._keys[i] = buffers, received
        self._sent += sent
        return True

    def _post_gradients(self, i: int, step: RingStep) -> bool:
        if i > self._done:
            return False
        given = self._computed.pop(i, ())
        sends = [(p.peer, _rows(x, p.at, p.at + p.end - p.begin)) for p in step.recvs for x in given]
        made = [self._buffers(p.end - p.begin) for p in step.sends]
        recvs = [(p.peer, x) for p, both in zip(step.sends, made, strict=True) for x in both]
        received, sent = _post(self.group, sends, recvs)
        found = [(p, *both) for p, both in zip(step.sends, made, strict=True)]
        self._returned.append((found, received, sent, given))
        return True

    def __iter__(self) -> Iterator[tuple[int, RingStep, Any, Any]]:
        """Gives each step with calls, and the rows of k and v that it has, when they may be read. The calls on them are queued
        when the next one is asked for."""
        for i, step in enumerate(self.steps):
            buffers, received = self._keys.pop(i)
            if step.rows:
                for work in received:
                    work.wait()
                self._in_use = buffers
                yield i, step, *(_rows(x, 0, step.rows) for x in buffers)
                self._free.append(buffers)
            self._done = i
            self._advance()

    def __enter__(self) -> _Transfers:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.finish()
        elif issubclass(kind, (RawattnError, torch.cuda.OutOfMemoryError)):
            self._abandon()

    def _abandon(self) -> None:
        """Does all that the others wait for."""
        for i in range(self._done + 1, len(self.steps)):
            buffers, received = self._keys.pop(i, (self._in_use, []))
            for work in received:
                work.wait()
            if self.steps[i].rows:
                self._free.append(buffers)
                if self._has_gradients and i not in self._computed:
                    self.give(i, *(x.fill_(torch.nan) for x in self._buffers(self.steps[i].rows)))
            self._done = i
            self._advance()
        for _ in self.returned():
            pass
        self.finish()

    def give(self, i: int, dk: Any, dv: Any) -> None:
        """Takes the gradients of a step's rows, to be sent to the ranks that have the rows."""
        self._computed[i] = dk, dv

    def returned(self, left: int = 0) -> Iterator[tuple[Piece, Any, Any]]:
        """Gives gradients of this rank's own rows that others computed, all but those of the last ``left`` steps posted."""
        while len(self._returned) > left:
            found, received, sent, _ = self._returned.popleft()
            for work in (*received, *sent):
                work.wait()
            yield from found

    def finish(self) -> None:
        """Waits until nothing that was sent is needed any more."""
        for work in self._sent:
            work.wait()


# ---- forward


def _forward(q: Any, k: Any, v: Any, sinks: Any, call: ContextCall, captured: tuple[Any, ...]) -> tuple[Any, Any]:
    found = PartialResults(q, v, call.schedule.tasks, dist.get_world_size(call.group))
    with _Transfers(call, k, v) as transfers:
        for task in call.schedule.local:
            found.make_room(task)
            found.add(task, _attend(q, k, v, task, call, captured))
        for _, step, k_rows, v_rows in transfers:
            for task in step.tasks:
                found.make_room(task)
                found.add(task, _attend(q, k_rows, v_rows, task, call, captured))
    return found.merged(sinks)


def _attend(q: Any, k: Any, v: Any, task: Task, call: ContextCall, captured: tuple[Any, ...]) -> Any:
    rows = _rows(q, *task.q), _rows(k, *task.kv), _rows(v, *task.kv)
    return attention.attention(*rows, **call.options(task, captured), return_lse=True)


# ---- backward


class _Sum:
    """The sum of gradients of rows of one tensor, in float32 (float64 for fp64), in the order in which they are added. ``first``,
    of all rows, may still be written until the result is asked for."""

    def __init__(self, like: Any, first: Any = None) -> None:
        self._like, self._first = like, first
        self._total: Any = None
        self._parts: list[tuple[int, int, Any]] = []

    def add(self, begin: int, x: Any) -> None:
        self._parts.append((begin, begin + x.shape[1], x))
        if len(self._parts) == 3:
            self._add_up()

    def _add_up(self) -> None:
        if self._total is None:
            number = torch.promote_types(self._like.dtype, torch.float32)
            self._total = self._like.new_zeros(self._like.shape, dtype=number)
        for begin, end, x in self._parts:
            self._total[:, begin:end].add_(x)
        self._parts = []

    def result(self) -> Any:
        """Returns the sum in the tensor's dtype."""
        rows = sorted(part[:2] for part in self._parts)
        apart = all(a[1] <= b[0] for a, b in itertools.pairwise(rows))
        if self._total is None and self._first is not None and apart:  # two numbers at most: rounded once all the same
            for begin, end, x in self._parts:
                self._first[:, begin:end].add_(x)
            return self._first
        if self._total is None and len(self._parts) == 1 and rows[0] == (0, self._like.shape[1]):
            return self._parts[0][2]
        self._add_up()
        return self._total.to(self._like.dtype) if self._first is None else torch.add(self._total, self._first, out=self._first)


class _Gradients:
    """The backward of a rank: the calls on rows of do, q, o and lse. ``wrt`` are numbers of captured tensors, whose gradients are
    added up in ``sums``, in float32 (float64 for fp64)."""

    def __init__(
        self,
        do: Any,
        dlse: Any,
        saved: tuple[Any, ...],
        call: ContextCall,
        captured: tuple[Any, ...] = (),
        wrt: tuple[int, ...] = (),
    ) -> None:
        self.q, self.k, self.v, self.o, self.lse = saved
        self.do, self.dlse, self.call, self.captured = do, dlse, call, captured
        self.wrt = tuple(captured[i] for i in wrt)
        self.sums = [x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.wrt]

    def of(self, task: Task, k: Any, v: Any, out: Any = None) -> Any:
        """Returns dq, dk and dv of one call, from o and lse over all keys."""
        (a, b), kv = task.q, task.kv
        lse, dlse = (None if x is None else x[..., a:b].contiguous() for x in (self.lse, self.dlse))
        do, q, o = (_rows(x, a, b) for x in (self.do, self.q, self.o))
        options = self.call.options(task, self.captured) | {"out": out and (*out, *(None for _ in self.wrt)), "wrt": self.wrt}
        found = attention.attention_backward(do, q, _rows(k, *kv), _rows(v, *kv), o, lse, dlse=dlse, **options)
        for total, x in zip(self.sums, found[3:], strict=True):
            total.add_(x)
        return found[:3]

    def heads(self, begin: int, end: int) -> _Gradients:
        """Returns the same for some of the heads of k and v."""
        ratio = self.q.shape[2] // self.k.shape[2]
        many = slice(begin * ratio, end * ratio)
        dlse = None if self.dlse is None else self.dlse[:, many]
        saved = self.q[:, :, many], self.k[:, :, begin:end], self.v[:, :, begin:end], self.o[:, :, many], self.lse[:, many]
        return _Gradients(self.do[:, :, many], dlse, saved, self.call)

    def halves(self) -> list[Any]:
        """Returns the calls on this rank's own keys as functions of where dq, dk and dv go: one for each half of the heads, where
        heads do not matter. The first half hides the wait for the first keys, the second that for the last gradients."""
        spec, kv_heads, ratio = self.call.spec, self.k.shape[2], self.q.shape[2] // self.k.shape[2]
        (task,) = self.call.schedule.local
        if kv_heads < 2 or sees_positions(spec) or spec.mask.of_head is not None:
            return [lambda dq, dk, dv: self.of(task, self.k, self.v, out=(dq, dk, dv))]

        def half(begin: int, end: int) -> Any:
            part, many = self.heads(begin, end), slice(begin * ratio, end * ratio)
            return lambda dq, dk, dv: part.of(
                task, part.k, part.v, out=(dq[:, :, many], dk[:, :, begin:end], dv[:, :, begin:end])
            )

        return [half(0, kv_heads // 2), half(kv_heads // 2, kv_heads)]


def _backward(work: _Gradients) -> tuple[Any, Any, Any]:
    """Returns dq, dk and dv of this rank's rows.

    Keys come as in the forward, and what they get here goes straight back to their owner in their dtype, to be added there in
    float32: half of what dk and dv in float32 would take if they went round with the keys, and as exact, since kernels round
    them to that dtype first.
    """
    call, like = work.call, (work.q, work.k, work.v)
    with _Transfers(call, work.k, work.v, gradients=True) as transfers:
        sums, late = _own_gradients(work, like)
        for i, step, k_rows, v_rows in transfers:
            of_step = _Sum(k_rows), _Sum(v_rows)
            for task in step.tasks:
                _add(task, work.of(task, k_rows, v_rows), sums[0], *of_step)
            both = [each.result() for each in of_step]
            transfers.give(i, *both)
            own = [(p, *(_rows(x, p.at, p.at + p.end - p.begin) for x in both)) for p in step.own]
            _add_returned(own, *sums[1:])
            _add_returned(transfers.returned(left=2), *sums[1:])
        for rest in late:
            rest()
        _add_returned(transfers.returned(), *sums[1:])
    dq, dk, dv = (each.result() for each in sums)
    return dq, dk, dv


def _own_gradients(work: _Gradients, like: tuple[Any, Any, Any]) -> tuple[list[_Sum], list[Any]]:
    """Returns the sums of dq, dk and dv, with what this rank's own keys add, and calls that are left for later."""
    local, lengths = work.call.schedule.local, (work.q.shape[1], work.k.shape[1])
    if len(local) == 1 and (local[0].q, local[0].kv) == ((0, lengths[0]), (0, lengths[1])):
        first = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]
        soon, *late = work.halves()
        soon(*first)
        found = [_Sum(x, made) for x, made in zip(like, first, strict=True)]
        return found, [functools.partial(each, *first) for each in late]
    found = [_Sum(x) for x in like]
    for task in local:
        _add(task, work.of(task, work.k, work.v), *found)
    return found, []


def _add(task: Task, found: tuple[Any, Any, Any], dq: _Sum, dk: _Sum, dv: _Sum) -> None:
    dq.add(task.q[0], found[0])
    dk.add(task.kv[0], found[1])
    dv.add(task.kv[0], found[2])


def _add_returned(found: Iterable[tuple[Piece, Any, Any]], dk: _Sum, dv: _Sum) -> None:
    for piece, dk_rows, dv_rows in found:
        dk.add(piece.begin, dk_rows)
        dv.add(piece.begin, dv_rows)


class _Context(torch.autograd.Function):
    """The call that autograd follows. It keeps q, k, v, sinks, o and lse of this rank, and what functions captured."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, call: ContextCall, *captured: Any) -> tuple[Any, Any]:
        """Computes o and lse."""
        k, v = k.contiguous(), v.contiguous()
        with torch.autocast(q.device.type, enabled=False):
            o, lse = _forward(q, k, v, sinks, call, captured)
        ctx.save_for_backward(q, k, v, sinks, o, lse, *captured)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if not any((*ctx.needs_input_grad[:2], *ctx.needs_input_grad[3:])):  # v is not in it
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Computes dq, dk, dv, dsinks and what captured tensors get."""
        read = {i for _, _, indices in ctx.call.functions for i in indices}
        wrt = tuple(i for i, needed in enumerate(ctx.needs_input_grad[5:]) if needed and i in read)
        found = _ContextBackward.apply(ctx.call, wrt, do, dlse, *ctx.saved_tensors)
        return (*found[:4], None, *found[4:])


class _ContextBackward(torch.autograd.Function):
    """The gradients. Autograd cannot follow them further, and says so when it comes to that."""

    @staticmethod
    def forward(ctx: Any, call: ContextCall, wrt: tuple[int, ...], do: Any, dlse: Any, *saved: Any) -> tuple[Any, ...]:
        """Computes dq, dk, dv, dsinks and one for each captured tensor, or None."""
        q, k, v, sinks, o, lse, *captured = saved
        # The others' keys need this rank all the same. Each call would copy a do that is expanded.
        do = torch.zeros_like(o) if do is None else making.dense(do)
        with torch.autocast(q.device.type, enabled=False):
            work = _Gradients(do, dlse, (q, k, v, o, lse), call, tuple(captured), wrt)
            found = _backward(work)
        of_captured = dict(zip(wrt, (x.to(y.dtype) for x, y in zip(work.sums, work.wrt, strict=True)), strict=True))
        dsinks = None if sinks is None else _sinks_gradient(do, dlse, o, lse, sinks)
        return (*found, dsinks, *(of_captured.get(i) for i in range(len(captured))))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        """Raises: a second derivative has no formula."""
        raise ProblemError(NO_SECOND)


def _sinks_gradient(do: Any, dlse: Any, o: Any, lse: Any, sinks: Any) -> Any:
    """Returns the gradient by the sinks of this rank's queries: of a logit without a value, so -p (delta - dlse)."""
    heads = [(x.to(lse.dtype) * y.to(lse.dtype)).sum(-1) for x, y in zip(do.unbind(2), o.unbind(2), strict=True)]  # little memory
    delta = torch.stack(heads, 1)
    p = torch.where(sinks[:, None] == lse, 1.0, (sinks[:, None] - lse).exp())  # of inf both are, and of -inf lse may be
    p = torch.where(sinks[:, None] == -torch.inf, 0.0, p)
    return (p * ((0.0 if dlse is None else dlse) - delta)).sum((0, 2))
