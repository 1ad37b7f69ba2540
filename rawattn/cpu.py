"""The CPU path: blocked attention with an online softmax, and its gradients, on all cores.

Work is cut into units: one sequence, one head of k and v, and some queries of all heads that share it. Threads take units off a
list, and ``lanes.attend`` computes one without the GIL. A unit's result depends on its own rows and keys alone, so it is the same
bits whatever the threads do. Threads live for one call: the pools of OpenMP and TBB, which outlive it, would compete with torch's
for the cores, and fail after a fork or under concurrent calls.

A unit of the backward has some keys and all queries, and owns dk and dv of its keys; where the keys of a head are in several
units, each writes a dq of its own, and these are added in order. How keys are cut does not depend on the threads either.

The loops know the logits of ``Scale`` and ``Softcap``. With any other ``logit`` a unit is computed by the reference's array
operations, in the format that is computed with: right for every score, but several times slower, and its products are those of
NumPy's BLAS, whose bits may depend on the threads that it takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import functions, reference
from .cache import private_folder, touch, warn_uncached
from .device import Device
from .device import cpu as this_cpu
from .errors import ProblemError, UnsupportedError
from .operand import Layout
from .operation import Backward, Forward
from .reference import Dropped
from .variant.element import ELEMENTS, Element
from .variant.mask import Pairs, UsedQueries, kept_pairs, of_head
from .variant.offset import OffsetScore
from .variant.score import Scale, Score, Softcap

# For the cost model: one core of an EPYC 7003 (Zen 3, AVX2).
PRODUCTS_PER_SECOND = 36e9  # in float32; half in float64
SECONDS_PER_NUMBER = {"fp64": 1.2e-9, "fp32": 0.8e-9, "fp16": 1.5e-9, "bf16": 1.5e-9}  # of k and v, to bring in
SECONDS_PER_UNIT = 40e-6
SECONDS_PER_THREAD = 80e-6
BACKWARD_UNITS = 32  # of a backward, where there are keys enough
DELTA_IN_THREADS = 1 << 20  # numbers of o from which on threads that compute delta pay
KEYS_PER_UNIT = 1024  # of a backward, at least: each unit brings in all queries anew

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a unit (queries times heads that share k and v), keys of a step, threads."""

    tile_q: int = 256
    tile_kv: int = 96
    threads: int = 1


def _queries(config: Config, op: Forward) -> int:
    """Queries of a unit."""
    return max(1, config.tile_q // op.heads_per_kv)


def _cap(score: Score) -> float | None:
    """The cap of the loops of lanes.py, 0 where the logit is the scaled dot product; None where they do not know its function."""
    score = score.base if isinstance(score, OffsetScore) else score  # type: ignore[assignment]
    logit = getattr(score.logit, "__func__", None)
    if logit is Scale.logit:
        return 0.0
    return score.cap if logit is Softcap.logit and hasattr(score, "cap") else None


def has_loops(score: Score) -> bool:
    """Says whether the loops know a score: a built-in one, or a Python function."""
    return hasattr(score, "arrays") or _cap(score) is not None


NOT_INVARIANT = (
    "array operations compute a score of your own, whose bits follow from how many rows there are; invariant is for built-in "
    "scores and Python functions"
)


class Kernel(NamedTuple):
    """The compiled loops, the seconds it took to get them, and whether they came from the cache folder."""

    loops: Any
    seconds: float
    cached: bool


_loading = threading.Lock()


def load(element: Element, name: str = "attend") -> Kernel:
    """The loops of that name in lanes.py, "attend" or "backward", for an element. The first call compiles them, which takes
    seconds and shows a spinner on a terminal, or reads them from the cache folder; later calls cost nothing."""
    number = np.dtype(element.lse_dtype).name
    with _loading:
        return _load(name, number, _storage(element).name if name == "attend" else number)


@functools.cache
def _load(name: str, number: str, storage: str) -> Kernel:
    start = time.perf_counter()
    with _spinner(f"compiling the CPU kernel {name} for {storage}, once"):
        loops = _compile(name, number, storage)
    return Kernel(loops, time.perf_counter() - start, bool(loops.stats.cache_hits))


def _compile(name: str, number: str, storage: str) -> Any:
    """The compiled loops, kept in the cache folder where that can be used; a warning says so where it cannot."""
    from . import lanes

    try:
        own = private_folder("numba", f"{name}-{storage}-{lanes.MACHINE}")
        tempfile.TemporaryFile(dir=own).close()  # Numba says nothing of a folder that it cannot write
        for entry in own.rglob("*.nb[ci]"):
            touch(entry)
        try:
            return lanes.compile(name, number, storage, own)
        except OSError:  # a full disk
            raise
        except Exception:  # an entry is damaged
            for entry in own.rglob("*.nb[ci]"):
                entry.unlink(missing_ok=True)
            return lanes.compile(name, number, storage, own)
    except OSError as error:
        warn_uncached(error)
        return lanes.compile(name, number, storage, None)


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    """Shows the text on stderr, if that is a terminal, from the moment that the body has taken a second."""
    done = threading.Event()

    def show() -> None:
        if not done.wait(1.0):
            from rich.console import Console

            with Console(stderr=True).status(text):
                done.wait()

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _storage(element: Element) -> np.dtype[Any]:
    """Returns the dtype in which the loops see k and v: 16-bit formats are seen as their bits."""
    return np.dtype(np.uint16) if element.itemsize == 2 else np.dtype(element.dtype)


@functools.cache
def _table(element: Element) -> Array:
    """The number that each 16-bit pattern means; empty for other formats."""
    patterns = np.arange(1 << 16 if element.itemsize == 2 else 0, dtype=np.uint16)
    return patterns.astype(_storage(element)).view(element.dtype).astype(element.lse_dtype)


def _element(x: Array) -> Element:
    return next(element for element in ELEMENTS.values() if x.dtype == element.dtype)


def _ends(name: str, cu_seqlens: Array, rows: int) -> list[int]:
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > rows:
        raise ProblemError(f"{name} is {ends}; it must start with 0, never fall, and end with the {rows} rows or before.")
    return ends


def _sequences(q: Array, k: Array, cu_seqlens_q: Array | None, cu_seqlens_kv: Array | None) -> list[tuple[Any, Any, Any]]:
    """Returns the place of each sequence: its rows of q, its rows of k, and its rows of lse."""
    if cu_seqlens_q is None or cu_seqlens_kv is None:
        return [(i, i, i) for i in range(len(q))]
    q_ends, kv_ends = _ends("cu_seqlens_q", cu_seqlens_q, len(q)), _ends("cu_seqlens_kv", cu_seqlens_kv, len(k))
    found = []
    for i in range(len(q_ends) - 1):
        rows = slice(q_ends[i], q_ends[i + 1])
        found.append((rows, slice(kv_ends[i], kv_ends[i + 1]), (slice(None), rows)))
    return found


def kept(mask: Pairs, heads: int, q_len: int, kv_len: int) -> tuple[Array, Array]:
    """First and one past the last key that each query of each head keeps, (q_len, heads)."""
    queries = np.arange(q_len)
    if not hasattr(mask, "of_head"):
        begin, end = (np.broadcast_to(bound[:, None], (q_len, heads)) for bound in mask.interval(queries, q_len, kv_len))
        return begin, end
    begins, ends = zip(*(of_head(mask, head).interval(queries, q_len, kv_len) for head in range(heads)), strict=True)
    return np.stack(begins, 1), np.stack(ends, 1)


def _sink_logits(sinks: Array | None, heads: int, number: npt.DTypeLike) -> Array:
    return np.full(heads, -np.inf, number) if sinks is None else sinks.astype(number)


def _in_threads(threads: int, units: list[Any], compute: Callable[[Any], None]) -> None:
    """Computes the units, in their order, by this thread and others."""
    queue = iter(units)

    def work() -> None:
        try:
            for unit in queue:
                compute(unit)
        finally:  # after an error nothing is left for the others to do
            for _ in queue:
                pass

    helpers = min(threads, len(units)) - 1
    if helpers < 1:
        return work()
    with ThreadPoolExecutor(helpers) as pool:
        futures = [pool.submit(work) for _ in range(helpers)]
        work()
    for future in futures:
        future.result()


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
    used: int  # queries


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The functions of a sequence in machine code, and its context for them; an address of 0 for none."""

    address: int = 0
    context: Array = dataclasses.field(default_factory=lambda: np.zeros(8, np.int64))
    mask: functions.HostMask | None = None
    offsets: tuple[int, int] = (0, 0)
    owners: tuple[Any, ...] = ()  # of what the address and the context point to
    pyramids: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def of_rows(
        self, head: int, group: int, queries: slice, width: int, kv_len: int, tile_kv: int
    ) -> tuple[int, Array, Array, Any]:  # fmt: skip
        """Returns what the loops are given for the queries of ``group`` heads from ``head`` on, which share a panel's rows; and
        what the context points to."""
        if not self.address:
            return 0, self.context, NO_CLASSES, None
        context, places = self.context.copy(), _places(head, group, queries, self.offsets[0], width)
        context[8:10] = places[0].ctypes.data, places[1].ctypes.data
        classes = self._classes(head, group, places[0][::width], places[0][width - 1 :: width], kv_len, tile_kv)
        return self.address, context, classes, places

    def _classes(self, head: int, group: int, first: Array, last: Array, kv_len: int, tile_kv: int) -> Array:
        """Returns which tiles of keys panels visit: 0 where no pair is kept, 2 where all are, 1 elsewhere."""
        keys = np.arange(0, max(1, kv_len), tile_kv)
        found = np.ones((len(first), len(keys)), np.uint8)
        if self.mask is None:
            found[:] = 2
        elif len(keys) >= FEWEST_TILES:
            begin = keys + self.offsets[1]
            ends = begin, np.minimum(begin + tile_kv, kv_len + self.offsets[1]) - 1
            boxes = (first[:, None, None], last[:, None, None]), tuple(x[None, :, None] for x in ends)
            heads = np.arange(head, head + group)
            each = self.mask.classify(int(self.context[10]), heads, *boxes, *self.context[11:15].tolist(), self.pyramids)
            found[:] = np.where((each == 0).all(-1), 0, np.where((each == 2).all(-1), 2, 1))
        return found


FEWEST_TILES = 4  # of keys of a sequence, for which classes are worth their price
NO_CLASSES = np.zeros((0, 0), np.uint8)
NO_FUNCTIONS = _Functions()


@functools.lru_cache(maxsize=256)
def _compiled(mask: Any, score: Any, number: str, backward: bool) -> Any:
    """Functions of these codes in machine code: a second, or read from the cache folder."""
    from . import lanes, lanes_function

    kind = lanes_function.Kind(mask, score, number, backward)
    digest = "-".join([code.digest if code is not None else "none" for code in (mask, score)] + ["backward"] * backward)
    with _loading, _spinner("compiling a mask or a score for the CPU, once"):
        try:
            return lanes_function.compile(kind, private_folder("numba", f"{digest}-{number}-{lanes.MACHINE}"))
        except OSError as error:
            warn_uncached(error)
            return lanes_function.compile(kind, None)


def _functions(sequence: Sequence, number: npt.DTypeLike, backward: bool = False) -> _Functions:
    """The functions of a sequence."""
    own = functions.host_functions(sequence.mask, sequence.score)
    found = [each for each in (own.mask, own.score) if each is not None]
    if not found:
        return NO_FUNCTIONS
    from . import lanes_function

    codes = [None if each is None else each.option.code for each in (own.mask, own.score)]
    compiled = _compiled(*codes, np.dtype(number).name, backward)
    context, kept = lanes_function.context_of([(each.option.code, each.arrays, each.option.numbers) for each in found])
    lengths = sequence.used, sequence.kv_len
    if any(own.offsets):
        lengths = (max(own.offsets[0] + lengths[0], own.offsets[1] + lengths[1]),) * 2
    context[5] = own.offsets[1]
    context[10:15] = sequence.batch, *lengths, *found[0].start(sequence.batch)
    return _Functions(compiled.address, context, own.mask, own.offsets, (compiled, kept))


def _known(sequences: list[Sequence], heads: int, invariant: bool) -> float | None:
    """The cap of the loops for these sequences; None where they do not know the functions, or there is too little to compute for
    compiling them to pay."""
    own = functions.host_functions(sequences[0].mask, sequences[0].score)
    if own.mask is None and own.score is None:
        return _cap(sequences[0].score)
    if not invariant and sum(len(each.q) * each.kv_len for each in sequences) * heads < FEW_PAIRS:
        return None
    return 0.0 if own.score is not None else _cap(sequences[0].score)


FEW_PAIRS = 1 << 22  # that the formula computes as soon as functions are compiled


class _Unit(NamedTuple):
    sequence: Sequence
    functions: _Functions
    kv_head: int
    queries: slice
    keys: int  # that it visits, more or less


def run_forward(
    q: Array, k: Array, v: Array, o: Array, lse: Array | None, mask: Pairs, score: Score, scale: float,
    sinks: Array | None = None, cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None,
    q_lens: Array | None = None, kv_lens: Array | None = None, dropped: Dropped | None = None, *, config: Config,
    invariant: bool = False,
) -> None:  # fmt: skip
    """Computes attention of NumPy arrays as the reference's, writing o and lse in place. Last dimensions are contiguous.

    Raises ProblemError where cu_seqlens do not describe sequences of these arrays.
    """
    heads, bounds_of, sequences = q.shape[-2], functools.cache(kept), []
    for i, (rows, keys, at) in enumerate(_sequences(q, k, cu_seqlens_q, cu_seqlens_kv)):
        q_len, kv_len, out = len(q[rows]), len(k[keys]), (o[rows], None if lse is None else lse[at])
        kv_len = kv_len if kv_lens is None else int(kv_lens[i])
        used = q_len if q_lens is None else int(q_lens[i])
        own = mask if used == q_len else UsedQueries(mask, used)
        bounds, places = bounds_of(own, heads, q_len, kv_len), (q[rows], k[keys][None], v[keys][None])
        own_score = functions.of_lengths(score, used, kv_len)
        sequences.append(Sequence(i, *places, ONE_PAGE, kv_len, *out, own, own_score, *bounds, used))
    run_sequences(sequences, heads, scale, sinks, config, dropped, invariant)


ONE_PAGE = np.zeros(1, np.int32)


def run_sequences(
    sequences: list[Sequence], heads: int, scale: float, sinks: Array | None, config: Config, dropped: Dropped | None = None,
    invariant: bool = False,
) -> None:  # fmt: skip
    """Computes attention of sequences of one number format, each by its own mask, and by scores of one kind; where ``invariant``,
    by the loops, whose bits do not depend on what else there is to compute."""
    units: list[_Unit] = []
    if not sequences:
        return
    kv_heads = sequences[0].k.shape[-2]
    step = max(1, config.tile_q // (heads // kv_heads))
    element = _element(sequences[0].q)
    cap = _known(sequences, heads, invariant)
    for sequence in sequences:
        own = NO_FUNCTIONS if cap is None else _functions(sequence, element.lse_dtype)
        for first in range(0, len(sequence.q), step):
            last = min(first + step, len(sequence.q))
            visits = int((sequence.end[last - 1] - sequence.begin[first]).max())
            units += [_Unit(sequence, own, kv_head, slice(first, last), visits) for kv_head in range(kv_heads)]
    units.sort(key=lambda unit: -unit.keys)  # the longest first, so that the threads end together
    sink_logits = _sink_logits(sinks, heads, element.lse_dtype)
    if cap is None:
        _in_threads(config.threads, units, functools.partial(_compute_by_formula, element, scale, dropped, sink_logits))
    else:
        attend = load(element).loops if units else None
        factors = (scale / cap if cap else scale, cap, config.tile_kv, _table(element))
        _in_threads(config.threads, units, functools.partial(_compute, element, attend, factors, dropped, sink_logits))


def _width(number: npt.DTypeLike) -> int:
    """The rows of a panel of the loops."""
    from . import lanes

    return int(lanes.BYTES // np.dtype(number).itemsize)


def _places(head: int, group: int, queries: slice, q_offset: int, width: int) -> Array:
    """The positions of the rows of a unit, the queries of ``group`` heads from ``head`` on, and their heads: (2, rows), with the
    last row again up to whole panels of this width."""
    rows = (queries.stop - queries.start) * group
    numbers = np.minimum(np.arange(-(-rows // width) * width), rows - 1)
    return np.stack([numbers // group + (queries.start + q_offset), numbers % group + head]).astype(np.int64, copy=False)


def _random(
    dropped: Dropped | None, sequence: int, head: int, group: int, queries: slice, width: int, first_key: int = 0
) -> tuple[Array, Array]:
    """Returns what the loops ask for dropout: ``_places``, and what all rows share."""
    if dropped is None:
        return NO_PLACES, NOTHING_DROPPED
    q_offset, kv_offset = dropped.offsets
    shared = dropped.option.threshold, dropped.seed, sequence, kv_offset + first_key
    return _places(head, group, queries, q_offset, width), np.array(shared, np.int64)


NO_PLACES, NOTHING_DROPPED = np.zeros((2, 0), np.int64), np.zeros(4, np.int64)


def _compute(element: Element, attend: Any, factors: tuple[Any, ...], dropped: Dropped | None, sinks: Array, unit: _Unit) -> None:
    sequence, own, kv_head, queries, _ = unit
    group, number, storage = len(sinks) // sequence.k.shape[2], element.lse_dtype, _storage(element)
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q = sequence.q[queries, heads].astype(number, order="C").reshape(-1, sequence.q.shape[-1])
    k, v = (x[:, :, kv_head].view(storage) for x in (sequence.k, sequence.v))
    begin, end = (bound[queries, heads].flatten() for bound in (sequence.begin, sequence.end))
    o, lse = np.empty((len(q), v.shape[-1]), number), np.empty(len(q), number)
    rows = kv_head * group, group, queries, _width(number)
    random = _random(dropped, sequence.batch, *rows)
    *asked, _pointed_to = own.of_rows(*rows, sequence.kv_len, factors[2])
    attend(q, k, v, sequence.pages, begin, end, np.resize(sinks[heads], len(q)), *random, *factors, *asked, o, lse)
    sequence.o[queries, heads] = o.reshape(-1, group, v.shape[-1])
    if sequence.lse is not None:
        sequence.lse[heads, queries] = lse.reshape(-1, group).T


def _formula(element: Element, mask: Pairs, score: Score, scale: float, dropped: Dropped | None = None) -> reference.Formula:
    """The reference's, in the format that is computed with."""
    return reference.Formula(np, {}, np.dtype(element.lse_dtype), lambda x: x, mask, score, scale, dropped)


def _gathered(sequence: Sequence, x: Array, kv_head: int) -> Array:
    """A head's keys or values of a sequence in order, (kv_len, 1, columns); those that no query keeps are zeros if they are
    several pages."""
    if sequence.kv_len <= x.shape[1] and x.shape[0] == 1:
        return x[0, : sequence.kv_len, kv_head, None]
    some = sequence.begin < sequence.end
    kept = np.arange(sequence.begin[some].min(initial=sequence.kv_len), sequence.end[some].max(initial=0))
    found = np.zeros((sequence.kv_len, 1, x.shape[3]), x.dtype)
    found[kept, 0] = x[sequence.pages[kept // x.shape[1]], kept % x.shape[1], kv_head]
    return found


def _compute_by_formula(element: Element, scale: float, dropped: Dropped | None, sinks: Array, unit: _Unit) -> None:
    sequence, _, kv_head, queries, _ = unit
    formula = _formula(element, sequence.mask, sequence.score, scale, dropped)
    group = len(sinks) // sequence.k.shape[2]
    heads, rows = slice(kv_head * group, (kv_head + 1) * group), np.arange(queries.start, queries.stop)
    q, k, v = sequence.q[:, heads], *(_gathered(sequence, x, kv_head) for x in (sequence.k, sequence.v))
    lse = np.repeat(sinks[heads, None], len(sequence.q), axis=1)
    o, origin = sequence.o[:, heads], (sequence.batch, heads.start)
    o[queries] = 0
    with np.errstate(all="ignore"):
        formula.forward_sequence(origin, q, k, v, sinks[heads].tolist(), rows, rows, o, lse)
    if sequence.lse is not None:
        sequence.lse[heads, queries] = lse[:, queries]


class _Rows(NamedTuple):
    """Arrays of a backward, of one sequence and all heads."""

    number: int  # of the sequence
    do: Array
    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array  # (heads, q_len)
    dlse: Array | None
    delta: Array  # (heads, q_len), to be computed
    sinks: Array
    dsinks: Array | None
    dq: Array
    dk: Array
    dv: Array


class _Gradients(NamedTuple):
    """Arrays of a backward, of one sequence and the query heads that share one head of k and v."""

    origin: tuple[int, int]  # numbers of the sequence and of the first query head
    do: Array
    q: Array
    k: Array
    v: Array
    lse: Array  # (heads, q_len)
    delta: Array
    dlse: Array | None
    sinks: Array
    dq: Array
    dk: Array
    dv: Array
    parts: Array | None  # (units, q_len, heads, head_dim), what each unit adds to dq; None where one unit has all keys


class _Keys(NamedTuple):
    """Some keys of a sequence: the queries that keep any of them, and, for the rows of these queries, which."""

    span: slice
    queries: slice
    begin: Array  # from the first of these keys on, (queries * heads)
    end: Array
    pairs: int


class _KeyUnit(NamedTuple):
    gradients: _Gradients
    number: int
    keys: _Keys


def run_backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, dq: Array, dk: Array, dv: Array, mask: Pairs, score: Score,
    scale: float, dlse: Array | None = None, sinks: Array | None = None, dsinks: Array | None = None,
    cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None, q_lens: Array | None = None,
    kv_lens: Array | None = None, dropped: Dropped | None = None, captured: dict[int, Array] | None = None, *,
    threads: int | None = None,
) -> None:  # fmt: skip
    """Computes the gradients of the reference's ``attention_backward`` from o and lse of the forward, on NumPy arrays, writing
    dq, dk, dv and dsinks in place. Rows of no sequence, and those that q_lens and kv_lens leave unused, get 0. ``captured``
    are the gradients of arrays that the score captured, by their numbers, which are written too, summed in float64 by one thread.

    ``threads`` are as many as pay unless given. Results are the same bits whatever their number, but for scores that the loops do
    not know. NaN or inf in a query, key or value may reach the gradients of rows that it is masked from.

    Raises ProblemError where cu_seqlens do not describe sequences of these arrays, UnsupportedError where the score has no slope.
    """
    if not hasattr(score, "slope"):
        raise UnsupportedError(f"the score {score!r} has no slope(...), its derivative by s, which gradients need.")
    element, cap, (heads, kv_heads) = _element(q), None if hasattr(mask, "keep") else _cap(score), (q.shape[-2], k.shape[-2])
    number, sequences = np.dtype(element.lse_dtype), _sequences(q, k, cu_seqlens_q, cu_seqlens_kv)
    delta, sink_logits = np.empty(lse.shape, number), _sink_logits(sinks, heads, number)
    sink_parts = None if dsinks is None else np.zeros((len(sequences), heads), number)
    group, all_rows, shared, units = heads // kv_heads, list[_Rows](), list[_Gradients](), list[_KeyUnit]()
    cuts = max(1, BACKWARD_UNITS // max(1, len(sequences) * kv_heads)) if cap is not None else 1
    keys_of = functools.cache(functools.partial(_keys_of, mask, group, kv_heads, cuts))
    for x, some in ((dq, (cu_seqlens_q, q_lens)), (dk, (cu_seqlens_kv, kv_lens)), (dv, (cu_seqlens_kv, kv_lens))):
        if any(each is not None for each in some):
            x[...] = 0
    for i, (rows, keys, at) in enumerate(sequences):
        n, m = (slice(len(x) if lens is None else int(lens[i])) for x, lens in ((q[rows], q_lens), (k[keys], kv_lens)))
        own_do, own_q, own_o, own_dq = (x[rows][n] for x in (do, q, o, dq))
        own_k, own_v, own_dk, own_dv = (x[keys][m] for x in (k, v, dk, dv))
        own_dlse, own_dsinks = (None if dlse is None else dlse[at][:, n]), (None if sink_parts is None else sink_parts[i])
        statistics = lse[at][:, n], own_dlse, delta[at][:, n], sink_logits, own_dsinks
        all_rows.append(_Rows(i, own_do, own_q, own_k, own_v, own_o, *statistics, own_dq, own_dk, own_dv))
        for gradients, spans in _by_head(all_rows[-1], keys_of(len(own_q), len(own_k))):
            shared.append(gradients)
            units += [_KeyUnit(gradients, j, some_keys) for j, some_keys in enumerate(spans)]
    units.sort(key=lambda unit: -unit.keys.pairs)
    if threads is None:
        seconds = _backward_seconds(sum(unit.keys.pairs for unit in units), q.shape[-1] + v.shape[-1])
        threads = _backward_threads(seconds, this_cpu())
    sums = {i: np.zeros(x.shape) for i, x in (captured or {}).items()}
    threads = 1 if sums else threads  # one order of sums
    if cap is None:
        formula = dataclasses.replace(_formula(element, mask, score, scale, dropped), sums=sums)
        compute = functools.partial(_gradients_by_formula, formula)
    else:
        factors = scale / cap if cap else scale, cap, scale
        compute = functools.partial(_gradients, load(element, "backward").loops, factors, dropped)
    _in_threads(threads if o.size >= DELTA_IN_THREADS else 1, all_rows, _delta)
    _in_threads(threads, units, compute)
    _in_threads(threads, [each for each in shared if each.parts is not None], _add_parts)
    if dsinks is not None and sink_parts is not None:
        dsinks[...] = sink_parts.sum(0)
    for i, x in (captured or {}).items():
        x[...] = sums[i]


def _by_head(x: _Rows, keys: list[list[_Keys]]) -> Iterator[tuple[_Gradients, list[_Keys]]]:
    """The arrays of each head of k and v, and the keys of its units."""
    group = x.q.shape[1] // x.k.shape[1]
    for h, spans in enumerate(keys):
        own = slice(h * group, (h + 1) * group)
        q, dlse = x.q[:, own], None if x.dlse is None else x.dlse[own]
        parts = None if len(spans) == 1 else np.zeros((len(spans), *q.shape), x.delta.dtype)
        statistics = x.lse[own], x.delta[own], dlse, x.sinks[own]
        outputs = x.dq[:, own], x.dk[:, h], x.dv[:, h]
        yield _Gradients((x.number, own.start), x.do[:, own], q, x.k[:, h], x.v[:, h], *statistics, *outputs, parts), spans


def _backward_seconds(pairs: int, columns: int) -> float:
    """About what a backward takes one thread."""
    return pairs * 5 * columns / PRODUCTS_PER_SECOND


def _backward_threads(seconds: float, device: Device) -> int:
    """The threads that pay for themselves."""
    return min(device.sm_count, 1 + int(seconds / (4 * SECONDS_PER_THREAD)))


def _spans(kv_len: int, cuts: int) -> list[slice]:
    """The keys of a sequence in runs, one for each unit."""
    count = max(1, min(cuts, kv_len // KEYS_PER_UNIT))
    ends = [kv_len * i // count for i in range(count + 1)]
    return [slice(*ends[i : i + 2]) for i in range(count)]


def _keys_of(mask: Pairs, group: int, kv_heads: int, cuts: int, q_len: int, kv_len: int) -> list[list[_Keys]]:
    """The keys of each unit of a sequence of these lengths, for each head of k and v."""
    begin, end = kept(mask, group * kv_heads, q_len, kv_len)
    heads = range(kv_heads if hasattr(mask, "of_head") else min(1, kv_heads))  # elsewhere all have the same
    of = [slice(h * group, (h + 1) * group) for h in heads]
    found = [[_some_keys(begin[:, own], end[:, own], span) for span in _spans(kv_len, cuts)] for own in of]
    return found * (kv_heads // max(1, len(found)))


def _some_keys(begin: Array, end: Array, span: slice) -> _Keys:
    if span.start:
        begin, end = begin - span.start, end - span.start
    begin, end = np.maximum(begin, 0).astype(np.int64, copy=False), np.minimum(end, span.stop - span.start)
    counts = np.maximum(end - begin, 0)
    touched = counts.any(1).nonzero()[0]
    queries = slice(int(touched[0]), int(touched[-1]) + 1) if len(touched) else slice(0, 0)
    return _Keys(span, queries, begin[queries].ravel(), end[queries].astype(np.int64, copy=False).ravel(), int(counts.sum()))


def _delta(x: _Rows) -> None:
    """Computes delta, and the gradients of the sinks from it."""
    number = x.delta.dtype
    x.delta[...] = np.einsum("qhd,qhd->hq", x.do.astype(number, copy=False), x.o.astype(number, copy=False))
    if x.dlse is not None:
        x.delta[...] -= x.dlse
    if x.dsinks is not None:
        with np.errstate(all="ignore"):
            sinks = x.sinks[:, None]
            p = np.where(sinks == -np.inf, 0.0, np.where(x.lse == sinks, 1.0, np.exp(sinks - x.lse)))  # 1 where both are inf
        x.dsinks[...] = -(p * x.delta).sum(-1)


def _gradients(loops: Any, factors: tuple[float, ...], dropped: Dropped | None, unit: _KeyUnit) -> None:
    x, j, (keys, queries, begin, end, _) = unit
    number, (sequence, head) = x.delta.dtype, x.origin
    inputs = (rows.astype(number, copy=False) for rows in (x.do[queries], x.q[queries], x.k[keys], x.v[keys]))
    random = _random(dropped, sequence, head, x.q.shape[1], queries, _width(number), keys.start)
    dq, dk, dv = (x.dq if x.parts is None else x.parts[j]), x.dk[keys], x.dv[keys]
    outputs = tuple(out if out.dtype == number else np.empty(out.shape, number) for out in (dq[queries], dk, dv))
    loops(*inputs, x.lse[:, queries], x.delta[:, queries], begin, end, *random, *factors, *outputs)
    for out, own in zip((dq[queries], dk, dv), outputs, strict=True):
        if out.dtype != number:
            out[...] = own
    dq[: queries.start] = 0
    dq[queries.stop :] = 0


def _gradients_by_formula(formula: reference.Formula, unit: _KeyUnit) -> None:
    x, number = unit.gradients, unit.gradients.delta.dtype
    dq, dk, dv = (np.zeros(rows.shape, number) for rows in (x.q, x.k[:, None], x.v[:, None]))
    dlse = np.zeros_like(x.delta) if x.dlse is None else x.dlse
    inputs = x.do, x.q, x.k[:, None], x.v[:, None], dlse, x.sinks.tolist()
    with np.errstate(all="ignore"):
        formula.backward_sequence(x.origin, *inputs, dq, dk, dv, np.zeros_like(x.sinks), (x.lse, x.delta))
    x.dq[...], x.dk[...], x.dv[...] = dq, dk[:, 0], dv[:, 0]


def _add_parts(x: _Gradients) -> None:
    if x.parts is not None:
        x.dq[...] = x.parts.sum(0)


class Cpu:
    """The CPU path as a kernel: the contract of ``kernel.base.Kernel``, but for launches. ``run`` takes their place."""

    name = "cpu"
    alignment = 1
    has_records = False
    config_type = Config

    def runs_on(self, device: Device) -> bool:
        """Says whether the device is a CPU."""
        return device.is_cpu

    def supports(self, op: Forward, device: Device) -> list[str]:
        """The reasons why the CPU path does not compute the operation on the device; none where it does."""
        found = [] if device.is_cpu else [f"it runs on the CPU, and the arrays are on {device.name}"]
        for which in ("head_dim", "head_dim_v"):
            if getattr(op, which) > 1024:
                found.append(f"{which} is {getattr(op, which)}; it takes up to 1024")
        if not hasattr(op.score, "logit"):
            found.append(f"it takes scores with a definition in Python, logit(...), and {type(op.score).__name__} has none")
        if op.constant_time:
            found.append("a CPU takes longer for some numbers, such as subnormal ones; constant_time is for GPUs")
        if op.invariant and not has_loops(op.score):
            found.append(NOT_INVARIANT)
        return found

    def meant_for(self, op: Any, device: Device) -> bool:
        """Says whether this kernel computes on the device."""
        return self.runs_on(device)

    def prefers(self, op: Any) -> bool:
        """True: nothing goes before it on the CPU."""
        return True

    def layout_reason(self, layout: Layout) -> str | None:
        """None: it reads whatever NumPy reads."""
        return None

    def legal(self, config: Config, op: Forward, device: Device) -> str | None:
        """The reason why the configuration cannot run the operation; None where it can."""
        for which, value in dataclasses.asdict(config).items():
            if not isinstance(value, int) or not 1 <= value <= 4096:
                return f"{which} is {value!r}; it must be an int from 1 to 4096"
        return None

    def tuning_shapes(self, op: Forward) -> tuple[Forward, ...]:
        """Only ``op``: the loops are compiled once for all configurations."""
        return (op,)

    def is_tried(self, op: Forward) -> bool:
        """Registers are the compiler's own."""
        return False

    def candidates(self, op: Forward, device: Device) -> list[Config]:
        """The legal configurations worth comparing."""
        tile_kv = 96 if op.head_dim + op.head_dim_v <= 512 else 48  # so that its keys and values stay in the L2 cache
        threads = {min(1 << i, device.sm_count) for i in range(device.sm_count.bit_length() + 1)}
        return [Config(tile_q, tile_kv, count) for tile_q in (512, 256, 128, 64, 32, 16) for count in sorted(threads)]

    def cost(self, config: Config, op: Forward, device: Device) -> float:
        """Estimated seconds: the units that fall to one thread, and the start of the threads."""
        queries, batch = _queries(config, op), max(1, op.batch)
        kept = kept_pairs(op.spec.placed_mask, op.q_len, op.kv_len) / max(1, op.q_len)
        fetched, used = (min(op.kv_len, kept + (rows + config.tile_kv) / 2) for rows in (queries, 16))
        rows = math.ceil(min(queries, op.q_len) * op.heads_per_kv / 16) * 16
        rate = PRODUCTS_PER_SECOND / (2 if op.element.name == "fp64" else 1)
        unit = (op.head_dim + op.head_dim_v) * (used * rows / rate + fetched * SECONDS_PER_NUMBER[op.element.name])
        units = op.batch * op.kv_heads * math.ceil(op.total_q / batch / queries)
        threads = max(1, min(config.threads, units))
        return math.ceil(units / threads) * (SECONDS_PER_UNIT + unit) + (threads - 1) * SECONDS_PER_THREAD

    def run(
        self, op: Forward, config: Config, q: Array, k: Array, v: Array, o: Array, lse: Array | None = None,
        cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None, sinks: Array | None = None,
        q_lens: Array | None = None, kv_lens: Array | None = None, seed: Array | None = None, **own: Array,
    ) -> None:  # fmt: skip
        """Computes the operation on NumPy arrays of its shapes, ``own`` of which its functions captured: ``run_forward``."""
        lengths = (cu_seqlens_q, cu_seqlens_kv, q_lens, kv_lens)
        spec, dropped = functions.on_host(op.spec, own, lengths[:2]), Dropped.of(op.spec, seed)
        run_forward(
            q,
            k,
            v,
            o,
            lse,
            spec.placed_mask,
            spec.placed_score,
            op.scale,
            sinks,
            *lengths,
            dropped,
            config=config,
            invariant=op.invariant,
        )

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Threads."""

    threads: int = 1


class CpuBackward(Cpu):
    """The backward on the CPU, likewise."""

    config_type = BackwardConfig  # type: ignore[assignment]

    def supports(self, op: Backward, device: Device) -> list[str]:  # type: ignore[override]
        """The reasons why the CPU path does not compute the operation; none where it does."""
        found, score = super().supports(op.forward, device), op.forward.score
        if device.is_cpu and not hasattr(score, "slope"):
            found.append(f"it needs the derivative of the score, slope(...), and {type(score).__name__} has none")
        return found

    def candidates(self, op: Any, device: Device) -> list[Any]:
        """As many threads as pay."""
        return [BackwardConfig(_backward_threads(self.cost(BackwardConfig(), op, device), device))]

    def cost(self, config: Any, op: Any, device: Device) -> float:
        """Estimated seconds."""
        forward = op.forward
        seconds = _backward_seconds(forward.pairs * forward.batch * forward.heads, forward.head_dim + forward.head_dim_v)
        return seconds / config.threads + config.threads * SECONDS_PER_THREAD

    def run(self, op: Any, config: Any, seed: Array | None = None, **arrays: Any) -> None:  # type: ignore[override]
        """Computes the operation on NumPy arrays, by name: ``run_backward``."""
        own = {each.name: arrays.pop(each.name) for each in op.captured}
        starts = arrays.get("cu_seqlens_q"), arrays.get("cu_seqlens_kv")
        spec, scale = functions.on_host(op.forward.spec, own, starts), op.forward.scale
        options = {"mask": spec.placed_mask, "score": spec.placed_score, "scale": scale, "dropped": Dropped.of(spec, seed)}
        captured = {int(name.rpartition("_")[2]): arrays.pop(f"d{name}") for name in op.wrt}
        run_backward(**arrays, **options, captured=captured, threads=config.threads)


CPU, CPU_BACKWARD = Cpu(), CpuBackward()
