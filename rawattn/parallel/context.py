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
        v: (batch, kv_len / n, kv_heads, head_dim_v), this rank's rows; copied where it is not contiguous.
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
    prepared = _prepare(q, k, v, sinks, taken, captured, group, layout, method)
    if prepared is None:
        with torch.autocast(q.device.type, enabled=False):
            return attention.attention(q, k, v, sinks=sinks, **options)
    o, lse = _Context.apply(q, k, v, sinks, ContextCall(*prepared, group), *captured)
    return (o, lse) if return_lse else o


KEPT = 256  # specs and schedules of a group
_kept: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # by group


def _prepare(
    q: Any, k: Any, v: Any, sinks: Any, options: dict[str, Any], captured: tuple[Any, ...], group: Any, layout: Any, method: Any
) -> tuple[Spec, Schedule, Parts] | None:
    """Makes the spec, the schedule and the functions of parts, and keeps them for the group's next call with such tensors and
    options; None where a rank is alone.

    Raises ProblemError for wrong arguments: before anything is sent, since the other ranks would wait for the rest."""
    check_layout(layout)
    if method not in METHODS:
        raise ProblemError(f"method is {method!r}; it must be one of {', '.join(map(repr, METHODS))}.")
    with torch.no_grad():
        forms = forms_of((q, k, v, sinks, *captured))
    request = request_for(Forward, Options(**options))
    key, kept = (request, forms and forms[0], layout, method), _kept.setdefault(group, {})
    prepared: tuple[Spec, Schedule, Parts] | None = kept.get(key)
    if prepared is not None:
        return prepared
    Spec.of(**functions.without(options))
    check_tensors(q, k, v, sinks, layout)
    count = dist.get_world_size(group)
    if count == 1:
        return None
    spec, parts = resolve_parts(q, k, v, options, captured, count, q_len=q.shape[1] * count, kv_len=k.shape[1] * count)
    prepared = spec, _make_schedule(q, k, v, spec, group, layout, method), parts
    if forms is not None and request.is_kept:
        cache_put(kept, key, prepared, KEPT)
    return prepared


Parts = tuple[tuple[str, Function, tuple[int, ...]], ...]  # functions with their roles, and the numbers of what they captured


def resolve_parts(
    q: Any, k: Any, v: Any, options: dict[str, Any], captured: tuple[Any, ...], count: int, **sizes: int
) -> tuple[Spec, Parts]:
    """Returns the spec of the whole, and those of its functions that are no built-in options, made by ``functions.of_part`` with
    these ``sizes``. Raises ProblemError where what they captured is not of the whole's sizes."""
    described = reading.read_named(Forward.names, (q, k, v)) | captures.read(options, captured)
    whole = Limits(q.shape[0], q.shape[2], q.shape[1] * count, k.shape[1] * count)
    spec = Spec.of(**captures.resolve(options, described, whole))
    parts, first = [], 0
    for role, function in functions.among(options):
        of_part, indices = functions.of_part(function, **sizes)
        if getattr(spec, role).is_function:
            parts.append((role, of_part, tuple(first + i for i in indices)))
        first += len(function.traced.labels)
    return spec, tuple(parts)


def bind_captured(parts: Parts, captured: tuple[Any, ...]) -> dict[str, BoundFunction]:
    """Returns the functions of parts with the arrays that they captured, by role."""
    return {role: BoundFunction(part.traced, [captured[i] for i in indices], part.numbers) for role, part, indices in parts}


def check_tensors(q: Any, k: Any, v: Any, sinks: Any, layout: str) -> None:
    """Raises ProblemError where q, k and v are no parts of sequences in this layout."""
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


def _make_schedule(q: Any, k: Any, v: Any, spec: Spec, group: Any, layout: str, method: str) -> Schedule:
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    if spec.mask.lists and not spec.mask.is_function:
        remedy = "give it as a function, or call head_attention: its interval does not say which keys are needed"
        raise ProblemError(f"mask is {spec.mask}, which keeps several runs of keys; {remedy}.")
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
    """A call of ``context_attention`` without its tensors."""

    spec: Spec
    schedule: Schedule
    functions: Parts
    group: Any

    def options(self, task: Task, captured: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the options of the attention call that computes a task."""
        q_offset, kv_offset = task.offsets or (None, None)
        mask = self.spec.mask if task.masked else None
        return {
            "mask": mask, "score": self.spec.score, "scale": self.spec.scale, "q_offset": q_offset, "kv_offset": kv_offset,
            "deterministic": self.spec.deterministic, **bind_captured(self.functions, captured),
        }  # fmt: skip


# ---- what goes over the wire


_used: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose communicator is made


def _connect(group: Any, device: Any) -> None:
    """Makes the group's communicator. NCCL makes it where all ranks take part, but not all send and receive in the first step."""
    if device.type == "cuda" and group not in _used:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _used.add(group)


Sent = list[tuple[int, Any]]  # pairs of a peer and (batch, rows, heads, columns), each batch contiguous


def _post(group: Any, sends: Sent, recvs: Sent) -> tuple[list[Any], list[Any]]:
    """Starts all transfers of a step at once, and returns the works to wait for before received rows are read, and those to wait
    for before sent rows change. Between two ranks the order is that of the lists, which is the same on both. NCCL waits for the
    current stream before it starts, and ``wait`` of a work makes the then current stream wait: until then the caller keeps the
    tensors, so that no memory is given back or written."""
    ops = [
        dist.P2POp(op, row, dist.get_global_rank(group, peer), group)
        for op, transfers in ((dist.irecv, recvs), (dist.isend, sends))
        for peer, x in transfers
        for row in x.unbind(0)
    ]
    works = dist.batch_isend_irecv(ops) if ops else []
    if len(works) < len(ops):  # one for all of them
        return (works, []) if recvs else ([], works)
    received = sum(len(x) for _, x in recvs)
    return works[:received], works[received:]


def _slice_rows(x: Any, begin: int, end: int) -> Any:
    return x[:, begin:end]


class _Transfers:
    """The transfers of a call: keys come from the other ranks, step by step, and their gradients go back.

    Every rank posts in one order: the keys of steps 0 and 1, then for each step s the keys of step s + 2 and the gradients of
    step s. A rank leaves out where it has nothing to do. What is posted waits only for what any rank posted before, so no rank
    waits for ever. Keys of a step go to one of two buffers, once the calls on its last contents are queued.

    It is a context manager. Where an attention call in it fails, on this rank alone perhaps, the rest is sent and received all
    the same, so that the others do not wait for ever and the next call finds nothing left. Gradients from here are then NaN.
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
        self._free = [self._make_buffers(max(used)) for _ in range(min(2, len(used)))]
        self._keys: dict[int, Any] = {}  # by step: buffers and what to wait for
        self._computed: dict[int, Any] = {}  # by step: gradients to send
        self._returned: deque[Any] = deque()  # posted gradients
        self._sent: list[Any] = []
        self._has_company = bool(call.schedule.local) and k.is_cuda  # products run meanwhile
        _connect(call.group, k.device)
        self._advance()

    def _make_buffers(self, rows: int) -> tuple[Any, Any]:
        return tuple(x.new_empty((x.shape[0], rows, *x.shape[2:])) for x in (self.k, self.v))

    def _advance(self) -> None:
        """Posts the next transfers, up to one that has to wait."""
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
        recvs = [(p.peer, _slice_rows(x, p.at, p.at + p.end - p.begin)) for p in step.recvs for x in buffers or ()]
        sends = [(p.peer, _slice_rows(x, p.begin, p.end)) for p in step.sends for x in (self.k, self.v)]
        received, sent = _post(self.group, sends, recvs)
        for p in step.copies:
            for x, buffer in zip((self.k, self.v), buffers or (), strict=True):
                _slice_rows(buffer, p.at, p.at + p.end - p.begin).copy_(_slice_rows(x, p.begin, p.end))
        self._keys[i] = buffers, received
        self._sent += sent
        return True

    def _post_gradients(self, i: int, step: RingStep) -> bool:
        if i > self._done:
            return False
        gradients = self._computed.pop(i, ())
        sends = [(p.peer, _slice_rows(x, p.at, p.at + p.end - p.begin)) for p in step.recvs for x in gradients]
        buffers = [self._make_buffers(p.end - p.begin) for p in step.sends]
        recvs = [(p.peer, x) for p, pair in zip(step.sends, buffers, strict=True) for x in pair]
        received, sent = _post(self.group, sends, recvs)
        pieces = [(p, *pair) for p, pair in zip(step.sends, buffers, strict=True)]
        self._returned.append((pieces, received, sent, gradients))
        return True

    def __iter__(self) -> Iterator[tuple[int, RingStep, Any, Any]]:
        """Gives each step that has calls, and its rows of k and v, when they may be read. The caller queues its calls on them
        before it asks for the next step."""
        for i, step in enumerate(self.steps):
            buffers, received = self._keys.pop(i)
            if step.rows:
                for work in received:
                    work.wait()
                self._in_use = buffers
                yield i, step, *(_slice_rows(x, 0, step.rows) for x in buffers)
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
        """Does all transfers that other ranks wait for; the gradients that it sends are NaN."""
        for i in range(self._done + 1, len(self.steps)):
            buffers, received = self._keys.pop(i, (self._in_use, []))
            for work in received:
                work.wait()
            if self.steps[i].rows:
                self._free.append(buffers)
                if self._has_gradients and i not in self._computed:
                    self.give(i, *(x.fill_(torch.nan) for x in self._make_buffers(self.steps[i].rows)))
            self._done = i
            self._advance()
        for _ in self.returned():
            pass
        self.finish()

    def give(self, i: int, dk: Any, dv: Any) -> None:
        """Takes the gradients of a step's rows, to be sent to the ranks that have the rows."""
        self._computed[i] = dk, dv

    def returned(self, left: int = 0) -> Iterator[tuple[Piece, Any, Any]]:
        """Gives the gradients of this rank's rows that others computed, except for those of the last ``left`` steps posted."""
        while len(self._returned) > left:
            pieces, received, sent, _ = self._returned.popleft()
            for work in (*received, *sent):
                work.wait()
            yield from pieces

    def finish(self) -> None:
        """Waits until nothing that was sent is needed any more."""
        for work in self._sent:
            work.wait()


# ---- forward


def _compute_forward(q: Any, k: Any, v: Any, sinks: Any, call: ContextCall, captured: tuple[Any, ...]) -> tuple[Any, Any]:
    results = PartialResults(q, v, call.schedule.tasks, dist.get_world_size(call.group))
    with _Transfers(call, k, v) as transfers:
        for task in call.schedule.local:
            results.make_room(task)
            results.add(task, _attend(q, k, v, task, call, captured))
        for _, step, k_rows, v_rows in transfers:
            for task in step.tasks:
                results.make_room(task)
                results.add(task, _attend(q, k_rows, v_rows, task, call, captured))
    return results.merge(sinks)


def _attend(q: Any, k: Any, v: Any, task: Task, call: ContextCall, captured: tuple[Any, ...]) -> Any:
    rows = _slice_rows(q, *task.q), _slice_rows(k, *task.kv), _slice_rows(v, *task.kv)
    return attention.attention(*rows, **call.options(task, captured), return_lse=True)


# ---- backward


class _Sum:
    """The sum of gradients of rows of a tensor, in float32 (float64 for fp64), in the order in which they are added. ``first``, a
    gradient of all its rows, may still be written until the result is asked for."""

    def __init__(self, tensor: Any, first: Any = None) -> None:
        self._tensor, self._first = tensor, first
        self._total: Any = None
        self._parts: list[tuple[int, int, Any]] = []

    def add(self, begin: int, x: Any) -> None:
        self._parts.append((begin, begin + x.shape[1], x))
        if len(self._parts) == 3:
            self._add_up()

    def _add_up(self) -> None:
        if self._total is None:
            number = torch.promote_types(self._tensor.dtype, torch.float32)
            self._total = self._tensor.new_zeros(self._tensor.shape, dtype=number)
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
        if self._total is None and len(self._parts) == 1 and rows[0] == (0, self._tensor.shape[1]):
            return self._parts[0][2]
        self._add_up()
        return self._total.to(self._tensor.dtype) if self._first is None else torch.add(self._total, self._first, out=self._first)


class _Gradients:
    """The gradients of a rank, by calls on rows of do, q, o and lse. ``wrt`` are indices of captured tensors, whose gradients are
    added up in ``sums``, in float32 (float64 for fp64)."""

    def __init__(
        self, do: Any, dlse: Any, saved: tuple[Any, ...], call: ContextCall, captured: tuple[Any, ...] = (),
        wrt: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.o, self.lse = saved
        self.do, self.dlse, self.call, self.captured = do, dlse, call, captured
        self.wrt = tuple(captured[i] for i in wrt)
        self.sums = [x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.wrt]

    def compute(self, task: Task, k: Any, v: Any, out: Any = None) -> Any:
        """Computes dq, dk and dv of a task, from o and lse over all keys."""
        (a, b), kv = task.q, task.kv
        lse, dlse = (None if x is None else x[..., a:b].contiguous() for x in (self.lse, self.dlse))
        do, q, o = (_slice_rows(x, a, b) for x in (self.do, self.q, self.o))
        options = self.call.options(task, self.captured) | {"out": out and (*out, *(None for _ in self.wrt)), "wrt": self.wrt}
        gradients = attention.attention_backward(do, q, _slice_rows(k, *kv), _slice_rows(v, *kv), o, lse, dlse=dlse, **options)
        for total, x in zip(self.sums, gradients[3:], strict=True):
            total.add_(x)
        return gradients[:3]

    def take_heads(self, begin: int, end: int) -> _Gradients:
        """Returns the gradients of some of the heads of k and v, and of the query heads that share them."""
        ratio = self.q.shape[2] // self.k.shape[2]
        many = slice(begin * ratio, end * ratio)
        dlse = None if self.dlse is None else self.dlse[:, many]
        saved = self.q[:, :, many], self.k[:, :, begin:end], self.v[:, :, begin:end], self.o[:, :, many], self.lse[:, many]
        return _Gradients(self.do[:, :, many], dlse, saved, self.call)

    def make_halves(self) -> list[Any]:
        """Makes the calls on this rank's keys, as functions of the outputs dq, dk and dv: one for each half of the heads, where
        heads do not matter. The first half hides the wait for the first keys, the second that for the last gradients."""
        spec, kv_heads, ratio = self.call.spec, self.k.shape[2], self.q.shape[2] // self.k.shape[2]
        (task,) = self.call.schedule.local
        if kv_heads < 2 or sees_positions(spec) or spec.mask.of_head is not None:
            return [lambda dq, dk, dv: self.compute(task, self.k, self.v, out=(dq, dk, dv))]

        def half(begin: int, end: int) -> Any:
            part, many = self.take_heads(begin, end), slice(begin * ratio, end * ratio)
            return lambda dq, dk, dv: part.compute(
                task, part.k, part.v, out=(dq[:, :, many], dk[:, :, begin:end], dv[:, :, begin:end])
            )

        return [half(0, kv_heads // 2), half(kv_heads // 2, kv_heads)]


def _compute_backward(work: _Gradients) -> tuple[Any, Any, Any]:
    """Computes dq, dk and dv of this rank's rows.

    Keys come as in the forward, and their gradients go straight back to their owner in their dtype, to be added there in
    float32. That is half of the bytes of dk and dv in float32 that went round with the keys, and as exact, since kernels round
    them to that dtype first.
    """
    call, tensors = work.call, (work.q, work.k, work.v)
    with _Transfers(call, work.k, work.v, gradients=True) as transfers:
        sums, late = _start_sums(work, tensors)
        for i, step, k_rows, v_rows in transfers:
            of_step = _Sum(k_rows), _Sum(v_rows)
            for task in step.tasks:
                _add(task, work.compute(task, k_rows, v_rows), sums[0], *of_step)
            gradients = [total.result() for total in of_step]
            transfers.give(i, *gradients)
            copies = [(p, *(_slice_rows(x, p.at, p.at + p.end - p.begin) for x in gradients)) for p in step.copies]
            _add_returned(copies, *sums[1:])
            _add_returned(transfers.returned(left=2), *sums[1:])
        for rest in late:
            rest()
        _add_returned(transfers.returned(), *sums[1:])
    dq, dk, dv = (total.result() for total in sums)
    return dq, dk, dv


def _start_sums(work: _Gradients, tensors: tuple[Any, Any, Any]) -> tuple[list[_Sum], list[Any]]:
    """Returns the sums of dq, dk and dv, begun with the gradients of this rank's keys, and the calls that are left for later."""
    local, lengths = work.call.schedule.local, (work.q.shape[1], work.k.shape[1])
    if len(local) == 1 and (local[0].q, local[0].kv) == ((0, lengths[0]), (0, lengths[1])):
        first = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        soon, *late = work.make_halves()
        soon(*first)
        sums = [_Sum(x, gradient) for x, gradient in zip(tensors, first, strict=True)]
        return sums, [functools.partial(half, *first) for half in late]
    sums = [_Sum(x) for x in tensors]
    for task in local:
        _add(task, work.compute(task, work.k, work.v), *sums)
    return sums, []


def _add(task: Task, gradients: tuple[Any, Any, Any], dq: _Sum, dk: _Sum, dv: _Sum) -> None:
    dq.add(task.q[0], gradients[0])
    dk.add(task.kv[0], gradients[1])
    dv.add(task.kv[0], gradients[2])


def _add_returned(pieces: Iterable[tuple[Piece, Any, Any]], dk: _Sum, dv: _Sum) -> None:
    for piece, dk_rows, dv_rows in pieces:
        dk.add(piece.begin, dk_rows)
        dv.add(piece.begin, dv_rows)


class _Context(torch.autograd.Function):
    """The call that autograd follows. It saves q, k, v, sinks, o and lse of this rank, and what functions captured."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, call: ContextCall, *captured: Any) -> tuple[Any, Any]:
        """Computes o and lse."""
        k, v = k.contiguous(), v.contiguous()
        with torch.autocast(q.device.type, enabled=False):
            o, lse = _compute_forward(q, k, v, sinks, call, captured)
        ctx.save_for_backward(q, k, v, sinks, o, lse, *captured)
        ctx.call = call
        ctx.set_materialize_grads(False)
        if not any((*ctx.needs_input_grad[:2], *ctx.needs_input_grad[3:])):  # v is not in it
            ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> tuple[Any, ...]:
        """Computes dq, dk, dv, dsinks and the gradients of captured tensors."""
        used = {i for _, _, indices in ctx.call.functions for i in indices}
        wrt = tuple(i for i, needed in enumerate(ctx.needs_input_grad[5:]) if needed and i in used)
        gradients = _ContextBackward.apply(ctx.call, wrt, do, dlse, *ctx.saved_tensors)
        return (*gradients[:4], None, *gradients[4:])


class _ContextBackward(torch.autograd.Function):
    """The gradients. A second derivative, for which autograd would follow them further, raises ProblemError."""

    @staticmethod
    def forward(ctx: Any, call: ContextCall, wrt: tuple[int, ...], do: Any, dlse: Any, *saved: Any) -> tuple[Any, ...]:
        """Computes dq, dk, dv, dsinks, and for each captured tensor its gradient, or None."""
        q, k, v, sinks, o, lse, *captured = saved
        # The others' keys need this rank all the same. Each call would copy a do that is expanded.
        do = torch.zeros_like(o) if do is None else making.dense(do)
        with torch.autocast(q.device.type, enabled=False):
            work = _Gradients(do, dlse, (q, k, v, o, lse), call, tuple(captured), wrt)
            gradients = _compute_backward(work)
        captured_gradients = dict(zip(wrt, (x.to(y.dtype) for x, y in zip(work.sums, work.wrt, strict=True)), strict=True))
        dsinks = None if sinks is None else _compute_sinks_gradient(do, dlse, o, lse, sinks)
        return (*gradients, dsinks, *(captured_gradients.get(i) for i in range(len(captured))))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        """Raises: a second derivative has no formula."""
        raise ProblemError(NO_SECOND)


def _compute_sinks_gradient(do: Any, dlse: Any, o: Any, lse: Any, sinks: Any) -> Any:
    """Computes the sinks' gradient of this rank's queries: that of a logit without a value, so -p (delta - dlse)."""
    heads = [(x.to(lse.dtype) * y.to(lse.dtype)).sum(-1) for x, y in zip(do.unbind(2), o.unbind(2), strict=True)]  # little memory
    delta = torch.stack(heads, 1)
    p = torch.where(sinks[:, None] == lse, 1.0, (sinks[:, None] - lse).exp())  # of inf both are, and of -inf lse may be
    p = torch.where(sinks[:, None] == -torch.inf, 0.0, p)
    return (p * ((0.0 if dlse is None else dlse) - delta)).sum((0, 2))
