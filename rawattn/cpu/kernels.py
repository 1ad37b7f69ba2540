"""The CPU path: blocked attention with an online softmax, and its gradients, on all cores.

Work is cut into units: one sequence, one head of k and v, and some queries of all heads that share it. Threads take units off a
list, and ``lanes.attend`` computes one without the GIL. A unit's result depends on its own rows and keys alone, so it is the same
bits whatever the threads do. Threads live for one call: the pools of OpenMP and TBB, which outlive it, would compete with torch's
for the cores, and fail after a fork or under concurrent calls.

A unit of the backward has some keys and all queries, and owns dk and dv of its keys; where the keys of a head are in several
units, each writes a dq of its own, and these are added in order. How keys are cut does not depend on the threads either.

The loops know the logits of ``Scale`` and ``Softcap``. With any other ``logit`` a unit is computed by the reference's array
operations, in the format that is computed with: right for every score, but several times slower, and its products are those of
NumPy's BLAS, whose bits may depend on the threads that it takes. Python functions are computed so, too.
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

from .. import reference
from ..compile.cache import private_folder, touch, warn_uncached
from ..driver.device import Device
from ..driver.device import cpu as this_cpu
from ..errors import ProblemError, UnsupportedError
from ..operation import Backward, Forward, functions
from ..operation.operand import Layout
from ..reference import Dropped
from ..variant.element import ELEMENTS, Element
from ..variant.mask import FirstQueries, Pairs, kept_pairs, of_head
from ..variant.offset import OffsetScore
from ..variant.score import Scale, Score, Softcap
from .unit import BATCH, BEFORE, BEHIND, BOUNDS, FIELDS, HEAD, KEY, KEYS, KV_HEAD, PAGE, POSITION, QUERIES, QUERY, ROW, SEQUENCE

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
class CpuConfig:
    """Rows of a unit (queries times heads that share k and v), keys of a step, threads."""

    tile_q: int = 256
    tile_kv: int = 96
    threads: int = 1


def _queries(config: CpuConfig, op: Forward) -> int:
    """Queries of a unit."""
    return max(1, config.tile_q // op.heads_per_kv)


def _cap(score: Score) -> float | None:
    """The cap of the loops of lanes.py, 0 where the logit is the scaled dot product; None where they do not know its function."""
    own: Any = score.base if isinstance(score, OffsetScore) else score
    if type(own).logit is Scale.logit:
        return 0.0
    return own.cap if isinstance(own, Softcap) and type(own).logit is Softcap.logit else None


def _known_cap(mask: Pairs, score: Score) -> float | None:
    """The same where neither is a traced function: None also for a mask whose queries keep several runs of keys."""
    return _cap(score) if mask.keep is None else None


def undefined(mask: Pairs) -> str | None:
    """The reason why nothing is computed by a mask of several runs of keys that does not say which; None for others."""
    if not mask.lists or mask.keep is not None:
        return None
    return f"it takes masks of several runs of keys with a definition in Python, keep(...), and {type(mask).__name__} has none"


class Kernel(NamedTuple):
    """The compiled loops, the seconds it took to get them, and whether they came from the cache folder."""

    loops: Any
    seconds: float
    cached: bool


_loading = threading.Lock()


def load(element: Element, name: str = "attend") -> Kernel:
    """The loops of that name in lanes.py, "attend" or "backward", for an element. The first call compiles them, which takes
    seconds and shows a spinner on a terminal, or reads them from the cache folder; later calls cost nothing."""
    found = _loaded.get((element.name, name))
    if found is None:
        number = np.dtype(element.lse_dtype).name
        with _loading:
            found = _load(name, number, _storage(element).name if name == "attend" else number)
        _loaded[element.name, name] = found
    return found


_loaded: dict[tuple[str, str], Kernel] = {}


@functools.cache
def _load(name: str, number: str, storage: str) -> Kernel:
    start = time.perf_counter()
    with _spinner(f"compiling the CPU kernel {name} for {storage}, once"):
        loops = _compile(name, number, storage)
    return Kernel(loops, time.perf_counter() - start, bool(loops.stats.cache_hits))


def load_lanes() -> Any:
    """The file lanes.py, which takes Numba, to compile what is in it."""
    from numba.core import config

    from . import lanes

    if config.DISABLE_JIT:
        raise UnsupportedError("NUMBA_DISABLE_JIT is set, and the CPU path is compiled by Numba; unset it.")
    return lanes


def _compile(name: str, number: str, storage: str) -> Any:
    """The compiled loops, kept in the cache folder where that can be used; a warning says so where it cannot."""
    lanes = load_lanes()
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
    return _BY_DTYPE[x.dtype]


_BY_DTYPE = {np.dtype(element.dtype): element for element in ELEMENTS.values()}


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
    if mask.of_head is None:
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


class _Unit(NamedTuple):
    """Some queries of a sequence, and the heads that share one head of k and v, for the formula."""

    sequence: Sequence
    kv_head: int
    queries: slice
    keys: int  # that it visits, more or less


class _Units(NamedTuple):
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


NO_UNITS = _Units(np.zeros((0, 1), np.int64), *[np.zeros(0, np.int64)] * 3)


class _Work(NamedTuple):
    """Arrays of four dimensions, and of lse three, of one or several sequences, and units of them."""

    q: Array
    k: Array
    v: Array
    pages: Array
    o: Array
    lse: Array
    units: _Units


def _flat(bounds: tuple[Array, Array], kv_heads: int) -> tuple[Array, Array, int]:
    """First and last keys of (queries, heads) in the order of the loops' rows, one head of k and v after the other; and how many
    there are of each such head, 0 where all have the same."""
    queries, heads = bounds[0].shape
    if all(bound.strides[1] == 0 for bound in bounds):
        bounds, kv_heads, heads = tuple(bound[:, : heads // kv_heads] for bound in bounds), 1, heads // kv_heads  # type: ignore[assignment]
    shape = queries, kv_heads, heads // max(1, kv_heads)
    begin, end = (np.ascontiguousarray(x.reshape(shape).transpose(1, 0, 2), np.int64).ravel() for x in bounds)
    return begin, end, 0 if kv_heads == 1 else queries * shape[2]


def _sequence_units(bounds: tuple[Array, Array], kv_heads: int, step: int, kv_len: int) -> _Units:
    """The units of a forward of one sequence, of which each has ``step`` queries, for a sequence of number 0 in its arrays."""
    (q_len, heads), (begin, end, of_head) = bounds[0].shape, _flat(bounds, kv_heads)
    first, head = (x.ravel() for x in np.meshgrid(np.arange(0, q_len, step), np.arange(kv_heads), indexing="ij"))
    table, last, group = np.zeros((len(first), FIELDS), np.int64), np.minimum(first + step, q_len), heads // max(1, kv_heads)
    table[:, ROW], table[:, QUERY], table[:, QUERIES], table[:, KEYS] = first, first, last - first, kv_len
    table[:, KV_HEAD], table[:, HEAD], table[:, BOUNDS] = head, head * group, head * of_head + first * group
    visits = (bounds[1][last - 1] - bounds[0][first]).max(1, initial=0)
    return _Units(table, np.maximum(visits, 0) * (last - first) + 1, begin, end)


def _joined(each: list[_Units], places: list[tuple[int, int, int, int, int]]) -> _Units:
    """The units of several sequences, given for each its number in the batch and first row of q, the place of its first page and
    first row of k, and its number among all."""
    if not each:
        return NO_UNITS
    counts = [len(units.table) for units in each]
    first_bounds = np.cumsum([0, *[len(units.begin) for units in each[:-1]]])
    table = np.concatenate([units.table for units in each])
    columns = [BATCH, ROW, PAGE, KEY, SEQUENCE, BOUNDS]
    table[:, columns] += np.repeat(np.column_stack([np.array(places, np.int64), first_bounds]), counts, axis=0)
    return _Units(table, *(np.concatenate([units[i] for units in each]) for i in range(1, 4)))


@functools.lru_cache(maxsize=32)
def _dense_units(mask: Pairs, heads: int, kv_heads: int, step: int, batch: int, q_len: int, kv_len: int) -> _Units:
    """The units of a forward of sequences of one length."""
    units = _sequence_units(kept(mask, heads, q_len, kv_len), kv_heads, step, kv_len)
    return _copied(units, batch)


def _copied(units: _Units, batch: int) -> _Units:
    """The units of the first sequence of a batch for all its sequences."""
    table, numbers = np.tile(units.table, (batch, 1)), np.repeat(np.arange(batch), len(units.table))
    table[:, BATCH] = table[:, PAGE] = table[:, SEQUENCE] = numbers
    return units._replace(table=table, costs=np.tile(units.costs, batch))


def _units_of(
    places: list[tuple[Any, Any, Any]], mask: Pairs, heads: int, kv_heads: int, step: int, q: Array, k: Array,
    q_lens: Array | None, kv_lens: Array | None,
) -> _Units:  # fmt: skip
    """The units of a forward of sequences of any lengths."""

    @functools.cache
    def units(used: int, q_len: int, kv_len: int) -> _Units:
        own = mask if used == q_len else FirstQueries(mask, used)
        return _sequence_units(kept(own, heads, q_len, kv_len), kv_heads, step, kv_len)

    each = []
    for i, (rows, keys, _) in enumerate(places):
        q_len, kv_len = len(q[rows]), len(k[keys]) if kv_lens is None else int(kv_lens[i])
        each.append(units(q_len if q_lens is None else int(q_lens[i]), q_len, kv_len))
    return _joined(each, [_place(i, rows, keys) for i, (rows, keys, _) in enumerate(places)])


def _place(i: int, rows: Any, keys: Any) -> tuple[int, int, int, int, int]:
    """Says for ``_joined`` where the sequence i lies."""
    return (0, rows.start, 0, keys.start, i) if isinstance(rows, slice) else (i, 0, i, 0, i)


SMALL = 1 << 14  # rows of a sequence or units of a call, up to which what follows from lengths alone is kept for the next call


def run_forward(
    q: Array, k: Array, v: Array, o: Array, lse: Array | None, mask: Pairs, score: Score, scale: float,
    sinks: Array | None = None, cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None,
    q_lens: Array | None = None, kv_lens: Array | None = None, dropped: Dropped | None = None, *, config: CpuConfig,
    invariant: bool = False,
) -> None:  # fmt: skip
    """Computes attention of NumPy arrays as the reference's, writing o and lse in place. Last dimensions are contiguous.

    Raises ProblemError where cu_seqlens do not describe sequences of these arrays.
    """
    heads, kv_heads, cap = q.shape[-2], k.shape[-2], _known_cap(mask, score)
    places = _sequences(q, k, cu_seqlens_q, cu_seqlens_kv)
    if cap is not None:
        step, element = max(1, config.tile_q // (heads // kv_heads)), _element(q)
        is_dense = cu_seqlens_q is None and q_lens is None and kv_lens is None
        if is_dense and q.shape[-3] * heads <= SMALL and len(q) * kv_heads <= SMALL:
            units = _dense_units(mask, heads, kv_heads, step, len(q), q.shape[1], k.shape[1])
        else:
            units = _units_of(places, mask, heads, kv_heads, step, q, k, q_lens, kv_lens)
        pages = np.arange(max(1, len(k)), dtype=np.int32) if q.ndim == 4 else ONE_PAGE
        whole = _Work(_whole(q), _whole(k), _whole(v), pages, _whole(o), _whole_lse(lse, element), units)
        return _run_loops([whole], cap, scale, sinks, config, dropped)
    sequences, bounds_of = [], functools.cache(kept)
    for i, (rows, keys, at) in enumerate(places):
        q_len, kv_len, out = len(q[rows]), len(k[keys]), (o[rows], None if lse is None else lse[at])
        kv_len = kv_len if kv_lens is None else int(kv_lens[i])
        used = q_len if q_lens is None else int(q_lens[i])
        own_mask = mask if used == q_len else FirstQueries(mask, used)
        bounds, arrays = bounds_of(own_mask, heads, q_len, kv_len), (q[rows], k[keys][None], v[keys][None])
        own_score = score.of_lengths(used, kv_len)
        sequences.append(Sequence(i, *arrays, ONE_PAGE, kv_len, *out, own_mask, own_score, *bounds))
    run_sequences(sequences, heads, scale, sinks, config, dropped, invariant)


def _whole(x: Array) -> Array:
    """An array of four dimensions; packed sequences are one in a batch."""
    return x if x.ndim == 4 else x[None]


def _whole_lse(lse: Array | None, element: Element) -> Array:
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
    kv_heads, element = sequences[0].k.shape[-2], _element(sequences[0].q)
    step, cap = max(1, config.tile_q // (heads // kv_heads)), _known_cap(sequences[0].mask, sequences[0].score)
    if cap is not None:
        works = []
        for x in sequences:
            each = _sequence_units((x.begin, x.end), kv_heads, step, x.kv_len)
            units = _joined([each], [(0, 0, 0, 0, x.batch)])
            arrays = x.q[None], x.k, x.v, np.ascontiguousarray(x.pages), x.o[None], _whole_lse(x.lse, element)
            works.append(_Work(*arrays, units))
        return _run_loops(works, cap, scale, sinks, config, dropped)
    step, found = 1 if invariant else step, list[_Unit]()
    for x in sequences:
        for first in range(0, len(x.q), step):
            last = min(first + step, len(x.q))
            visits = int((x.end[last - 1] - x.begin[first]).max())
            found += [_Unit(x, kv_head, slice(first, last), visits) for kv_head in range(kv_heads)]
    found.sort(key=lambda unit: -unit.keys)
    sink_logits = _sink_logits(sinks, heads, element.lse_dtype)
    _in_threads(config.threads, found, functools.partial(_compute_by_formula, element, scale, dropped, sink_logits))


def _run_loops(
    works: list[_Work], cap: float, scale: float, sinks: Array | None, config: CpuConfig, dropped: Dropped | None
) -> None:
    """Computes units by the loops."""
    shares = [(work, chunk) for work in works for chunk in work.units.chunks(config.threads) if len(chunk)]
    if not shares:
        return
    element = _element(works[0].q)
    factors = (_random(dropped), scale / cap if cap else scale, cap, config.tile_kv, _table(element))
    sink_logits = _sink_logits(sinks, works[0].q.shape[2], element.lse_dtype)
    _in_threads(config.threads, shares, functools.partial(_compute, element, load(element).loops, sink_logits, factors))


def _width(number: npt.DTypeLike) -> int:
    """The rows of a panel of the loops."""
    return int(load_lanes().BYTES // np.dtype(number).itemsize)


def _random(dropped: Dropped | None) -> Array:
    """Returns what the loops are told of dropout."""
    return NOTHING_DROPPED if dropped is None else np.array((dropped.option.threshold, dropped.seed, *dropped.offsets), np.int64)


NOTHING_DROPPED = np.zeros(4, np.int64)


def _compute(element: Element, attend: Any, sinks: Array, factors: tuple[Any, ...], share: tuple[_Work, Array]) -> None:
    """Computes some units: all in one call, where arrays are in the format that is computed with."""
    work, table = share
    q, k, v, pages, o, lse, units = work
    storage, random, factors = _storage(element), factors[0], factors[1:]
    if q.dtype == element.lse_dtype:
        attend(q, k, v, pages, table, units.begin, units.end, sinks, random, *factors, o, lse)
        return
    k, v, group = k.view(storage), v.view(storage), q.shape[2] // k.shape[2]
    for unit in table:
        batch, rows, kv_head, alone = _alone(unit)
        heads = slice(kv_head * group, (kv_head + 1) * group)
        own_q, own_lse = q[batch, rows, heads].astype(element.lse_dtype)[None], lse[batch, heads, rows][None] if lse.size else lse
        own_o = np.empty((*own_q.shape[:3], v.shape[3]), element.lse_dtype)
        keys = k[:, :, kv_head, None], v[:, :, kv_head, None]
        arrays = own_q, *keys, pages, alone, units.begin, units.end, np.ascontiguousarray(sinks[heads])
        attend(*arrays, random, *factors, own_o, own_lse)
        o[batch, rows, heads] = own_o[0]


def _alone(unit: Array) -> tuple[int, slice, int, Array]:
    """Returns a unit's number in the batch, its rows and its head of k, and the unit in arrays of these alone."""
    batch, first, count, kv_head = (int(unit[i]) for i in (BATCH, ROW, QUERIES, KV_HEAD))
    alone = unit.copy()
    alone[[BATCH, ROW, KV_HEAD]] = 0
    return batch, slice(first, first + count), kv_head, alone[None]


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
    sequence, kv_head, queries, _ = unit
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
    dsinks: Array
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


class _KeyUnit(NamedTuple):
    """The gradients of one sequence and head of k and v, for the formula."""

    gradients: _Gradients
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
    units: _Units
    dq: Array
    dk: Array
    dv: Array


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
    if score.slope is None:
        raise UnsupportedError(f"the score {score!r} has no slope(...), its derivative by s, which gradients need.")
    if cu_seqlens_q is not None or q_lens is not None:
        dq[...] = 0
    if cu_seqlens_kv is not None or kv_lens is not None:
        dk[...], dv[...] = 0, 0
    element, cap = _element(q), _known_cap(mask, score)
    inputs = _whole(do), _whole(q), _whole(k), _whole(v), _whole(o), _whole_lse(lse, element), _whole_lse(dlse, element)
    work = _BackwardWork(*inputs, NO_UNITS, _whole(dq), _whole(dk), _whole(dv))
    is_dense, rows = cu_seqlens_q is None and q_lens is None and kv_lens is None, list[_Rows]()
    if is_dense:
        spots = [(i, 0, q.shape[1], 0, k.shape[1]) for i in range(len(q))]
    else:
        spots = _spots(q, k, cu_seqlens_q, cu_seqlens_kv, q_lens, kv_lens)
    if cap is None or dsinks is not None:
        sink_parts = np.zeros((len(spots), q.shape[-2]), element.lse_dtype)
        rows = _rows(work, spots, _sink_logits(sinks, q.shape[-2], element.lse_dtype), sink_parts)
        _in_threads((threads or this_cpu().sm_count) if o.size >= DELTA_IN_THREADS else 1, rows, _delta)
        if dsinks is not None:
            dsinks[...] = sink_parts.sum(0)
    if cap is None:
        _backward_by_formula(rows, _formula(element, mask, score, scale, dropped), captured or {}, threads)
    else:
        factors = scale / cap if cap else scale, cap, scale
        _backward_by_loops(work, spots, is_dense, mask, factors, dropped, threads)


_Spot = tuple[int, int, int, int, int]  # of a sequence: its number in the batch, the first row and the rows of q, and those of k


def _spots(
    q: Array, k: Array, cu_seqlens_q: Array | None, cu_seqlens_kv: Array | None, q_lens: Array | None, kv_lens: Array | None
) -> list[_Spot]:
    """Says where each sequence has its used rows."""
    found = []
    for i, (rows, keys, _) in enumerate(_sequences(q, k, cu_seqlens_q, cu_seqlens_kv)):
        n, m = (len(x) if lens is None else int(lens[i]) for x, lens in ((q[rows], q_lens), (k[keys], kv_lens)))
        found.append((0, rows.start, n, keys.start, m) if isinstance(rows, slice) else (i, 0, n, 0, m))
    return found


def _rows(x: _BackwardWork, spots: list[_Spot], sinks: Array, sink_parts: Array) -> list[_Rows]:
    """The arrays of each sequence, with a delta that is to be computed."""
    delta, found = np.empty(x.lse.shape, x.lse.dtype), []
    for i, (batch, row, n, key, m) in enumerate(spots):
        own, keys, at = (batch, slice(row, row + n)), (batch, slice(key, key + m)), (batch, slice(None), slice(row, row + n))
        statistics = x.lse[at], x.dlse[at] if x.dlse.size else None, delta[at], sinks, sink_parts[i]
        found.append(
            _Rows(i, x.do[own], x.q[own], x.k[keys], x.v[keys], x.o[own], *statistics, x.dq[own], x.dk[keys], x.dv[keys])
        )
    return found


def _backward_by_formula(
    rows: list[_Rows], formula: reference.Formula, captured: dict[int, Array], threads: int | None
) -> None:  # fmt: skip
    """Computes the gradients of sequences whose delta is known."""
    sums, units = {i: np.zeros(x.shape) for i, x in captured.items()}, list[_KeyUnit]()
    for x in rows:
        (kv_len, kv_heads), group = x.k.shape[:2], x.q.shape[1] // x.k.shape[1]
        begin, end = kept(formula.mask, group * kv_heads, len(x.q), kv_len)
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            statistics = x.lse[own], x.delta[own], None if x.dlse is None else x.dlse[own], x.sinks[own]
            outputs = x.dq[:, own], x.dk[:, h], x.dv[:, h]
            each = _Gradients((x.number, own.start), x.do[:, own], x.q[:, own], x.k[:, h], x.v[:, h], *statistics, *outputs)
            pairs = np.minimum(end[:, own], kv_len) - np.maximum(begin[:, own], 0)
            units.append(_KeyUnit(each, int(np.maximum(pairs, 0).sum())))
    units.sort(key=lambda unit: -unit.pairs)
    if threads is None and units:
        columns = units[0].gradients.q.shape[-1] + units[0].gradients.v.shape[-1]
        threads = _backward_threads(_backward_seconds(sum(unit.pairs for unit in units), columns), this_cpu())
    formula = dataclasses.replace(formula, sums=sums)
    _in_threads(1 if sums else threads or 1, units, functools.partial(_gradients_by_formula, formula))  # one order of sums
    for i, gradient in captured.items():
        gradient[...] = sums[i]


def _backward_by_loops(
    whole: _BackwardWork, spots: list[_Spot], is_dense: bool, mask: Pairs, factors: tuple[float, ...], dropped: Dropped | None,
    threads: int | None,
) -> None:  # fmt: skip
    """Computes the gradients of sequences."""
    works, parts = _backward_works(whole, spots, is_dense, mask)
    if threads is None:
        pairs = sum(int(work.units.costs.sum()) for work in works)
        threads = _backward_threads(_backward_seconds(pairs, whole.q.shape[-1] + whole.v.shape[-1]), this_cpu())
    shares = [(work, chunk) for work in works for chunk in work.units.chunks(threads) if len(chunk)]
    if shares:
        loops = load(_element(whole.q), "backward").loops
        _in_threads(threads, shares, functools.partial(_gradients, loops, _random(dropped), factors))
    if parts:
        _in_threads(threads, parts, _add_parts)


def _backward_works(
    whole: _BackwardWork, spots: list[_Spot], is_dense: bool, mask: Pairs
) -> tuple[list[_BackwardWork], list[tuple[Array, Array]]]:
    """The units of a backward; and, of each head of sequences whose keys are in several units, dq and what they add to it."""
    (batch, q_len, heads), (kv_len, kv_heads) = whole.q.shape[:3], whole.k.shape[1:3]
    cuts = max(1, BACKWARD_UNITS // max(1, len(spots) * kv_heads))
    if is_dense and len(_spans(kv_len, cuts)) == 1 and q_len * heads <= SMALL and batch * kv_heads <= SMALL:
        return [whole._replace(units=_dense_key_units(mask, heads, kv_heads, batch, q_len, kv_len))], []
    units_of = functools.cache(functools.partial(_key_units, mask, heads, kv_heads, cuts))
    each = [(i, spot, units_of(spot[2], spot[4])) for i, spot in enumerate(spots)]
    uncut = [(spans[0], (spot[0], spot[1], spot[0], spot[3], i)) for i, spot, spans in each if len(spans) == 1]
    works, sums = [whole._replace(units=_joined([units for units, _ in uncut], [at for _, at in uncut]))], []
    for i, (number, row, n, key, _), spans in each:
        if len(spans) > 1:
            own, at = (
                (slice(number, number + 1), slice(row, row + n)),
                (slice(number, number + 1), slice(None), slice(row, row + n)),
            )
            of_rows = {name: getattr(whole, name)[own] for name in ("do", "q", "o")}
            statistics = {"lse": whole.lse[at], "dlse": whole.dlse[at]}
            parts = np.empty((len(spans), *of_rows["q"].shape), whole.lse.dtype)
            for units, dq in zip(spans, parts, strict=True):
                joined = _joined([units], [(0, 0, number, key, i)])
                works.append(whole._replace(**of_rows, **statistics, dq=dq, units=joined))
            sums += [(whole.dq[own][:, :, h], parts[:, :, :, h]) for h in range(heads)]
    return works, sums


@functools.lru_cache(maxsize=32)
def _dense_key_units(mask: Pairs, heads: int, kv_heads: int, batch: int, q_len: int, kv_len: int) -> _Units:
    """The units of a backward of sequences of one length, each with all keys of a head."""
    return _copied(_key_units(mask, heads, kv_heads, 1, q_len, kv_len)[0], batch)


def _key_units(mask: Pairs, heads: int, kv_heads: int, cuts: int, q_len: int, kv_len: int) -> list[_Units]:
    """The units of a backward of one sequence, for each run of its keys; what they cost are the pairs that count."""
    begin, end, of_head = _flat(kept(mask, heads, q_len, kv_len), kv_heads)
    group, found = heads // max(1, kv_heads), []
    for span in _spans(kv_len, cuts):
        keys = span.stop - span.start
        own_begin, own_end = np.maximum(begin - span.start, 0), np.minimum(end - span.start, keys)
        counts = np.maximum(own_end - own_begin, 0).reshape(len(begin) // max(1, q_len * group), q_len, group).sum(2)
        table, costs = np.zeros((kv_heads, FIELDS), np.int64), np.zeros(kv_heads, np.int64)
        table[:, KEY], table[:, POSITION], table[:, KEYS] = span.start, span.start, keys
        for h in range(kv_heads):
            pairs = counts[h if of_head else 0] if q_len else counts[:0]
            touched = np.flatnonzero(pairs)  # the queries that keep any of these keys
            start, stop = (int(touched[0]), int(touched[-1]) + 1) if len(touched) else (0, 0)
            own = {ROW: start, QUERY: start, QUERIES: stop - start, BEFORE: start, BEHIND: q_len - stop, KV_HEAD: h}
            own |= {HEAD: h * group, BOUNDS: h * of_head + start * group}
            table[h, list(own)], costs[h] = list(own.values()), pairs.sum()
        found.append(_Units(table, costs, own_begin, own_end))
    return found


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


def _delta(x: _Rows) -> None:
    """Computes delta, and the gradients of the sinks from it."""
    number = x.delta.dtype
    x.delta[...] = np.einsum("qhd,qhd->hq", x.do.astype(number, copy=False), x.o.astype(number, copy=False))
    if x.dlse is not None:
        x.delta[...] -= x.dlse
    with np.errstate(all="ignore"):
        sinks = x.sinks[:, None]
        p = np.where(sinks == -np.inf, 0.0, np.where(x.lse == sinks, 1.0, np.exp(sinks - x.lse)))  # 1 where both are inf
    x.dsinks[...] = -(p * x.delta).sum(-1)


def _gradients(loops: Any, random: Array, factors: tuple[float, ...], share: tuple[_BackwardWork, Array]) -> None:
    """Computes some units: all in one call, where arrays are in the format that is computed with."""
    x, table = share
    do, q, k, v, o, lse, dlse, (_, _, begin, end), dq, dk, dv = x
    if q.dtype == lse.dtype:
        loops(do, q, k, v, o, lse, dlse, table, begin, end, random, *factors, dq, dk, dv)
        return
    number, group = lse.dtype, q.shape[2] // k.shape[2]
    for unit in table:
        batch, rows, kv_head, alone = _alone(unit)
        heads, first = slice(kv_head * group, (kv_head + 1) * group), int(unit[KEY])
        own, keys = (batch, rows, heads), (int(unit[PAGE]), slice(first, first + int(unit[KEYS])), slice(kv_head, kv_head + 1))
        alone[:, [PAGE, KEY, BEFORE, BEHIND]] = 0
        inputs = [each[at][None].astype(number, copy=False) for each, at in ((do, own), (q, own), (k, keys), (v, keys), (o, own))]
        statistics = lse[batch, heads, rows][None], dlse[batch, heads, rows][None] if dlse.size else dlse
        found = [np.empty(inputs[i].shape, number) for i in (1, 2, 3)]
        loops(*inputs, *statistics, alone, begin, end, random, *factors, *found)
        for gradient, at, out in zip((dq, dk, dv), (own, keys, keys), found, strict=True):
            gradient[at] = out[0]
        dq[batch, rows.start - int(unit[BEFORE]) : rows.start, heads] = 0
        dq[batch, rows.stop : rows.stop + int(unit[BEHIND]), heads] = 0


def _gradients_by_formula(formula: reference.Formula, unit: _KeyUnit) -> None:
    x, number = unit.gradients, unit.gradients.delta.dtype
    dq, dk, dv = (np.zeros(rows.shape, number) for rows in (x.q, x.k[:, None], x.v[:, None]))
    dlse = np.zeros_like(x.delta) if x.dlse is None else x.dlse
    inputs = x.do, x.q, x.k[:, None], x.v[:, None], dlse, x.sinks.tolist()
    with np.errstate(all="ignore"):
        formula.backward_sequence(x.origin, *inputs, dq, dk, dv, np.zeros_like(x.sinks), (x.lse, x.delta))
    x.dq[...], x.dk[...], x.dv[...] = dq, dk[:, 0], dv[:, 0]


def _add_parts(parts: tuple[Array, Array]) -> None:
    dq, added = parts
    dq[...] = added.sum(0)


class Cpu:
    """The CPU path as a kernel: the contract of ``kernel.base.Kernel``, but for launches. ``run`` takes their place."""

    name = "cpu"
    alignment = 1
    has_records = False
    config_type = CpuConfig

    def runs_on(self, device: Device) -> bool:
        """Says whether the device is a CPU."""
        return device.is_cpu

    def supports(self, op: Forward, device: Device) -> list[str]:
        """The reasons why the CPU path does not compute the operation on the device; none where it does."""
        found = [] if device.is_cpu else [f"it runs on the CPU, and the arrays are on {device.name}"]
        for which in ("head_dim", "head_dim_v"):
            if getattr(op, which) > 1024:
                found.append(f"{which} is {getattr(op, which)}; it takes up to 1024")
        if op.score.logit is None:
            found.append(f"it takes scores with a definition in Python, logit(...), and {type(op.score).__name__} has none")
        if op.constant_time:
            found.append("a CPU takes longer for some numbers, such as subnormal ones; constant_time is for GPUs")
        if (reason := undefined(op.mask)) is not None:
            found.append(reason)
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

    def legal(self, config: CpuConfig, op: Forward, device: Device) -> str | None:
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

    def candidates(self, op: Forward, device: Device) -> list[CpuConfig]:
        """The legal configurations worth comparing."""
        tile_kv = 96 if op.head_dim + op.head_dim_v <= 512 else 48  # so that its keys and values stay in the L2 cache
        threads = {min(1 << i, device.sm_count) for i in range(device.sm_count.bit_length() + 1)}
        return [CpuConfig(tile_q, tile_kv, count) for tile_q in (512, 256, 128, 64, 32, 16) for count in sorted(threads)]

    def cost(self, config: CpuConfig, op: Forward, device: Device) -> float:
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
        self, op: Forward, config: CpuConfig, q: Array, k: Array, v: Array, o: Array, lse: Array | None = None,
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
class CpuBackwardConfig:
    """Threads."""

    threads: int = 1


class CpuBackward(Cpu):
    """The backward on the CPU, likewise."""

    config_type = CpuBackwardConfig  # type: ignore[assignment]

    def supports(self, op: Backward, device: Device) -> list[str]:  # type: ignore[override]
        """The reasons why the CPU path does not compute the operation; none where it does."""
        found, score = super().supports(op.forward, device), op.forward.score
        if device.is_cpu and score.slope is None:
            found.append(f"it needs the derivative of the score, slope(...), and {type(score).__name__} has none")
        return found

    def candidates(self, op: Any, device: Device) -> list[Any]:
        """As many threads as pay."""
        return [CpuBackwardConfig(_backward_threads(self.cost(CpuBackwardConfig(), op, device), device))]

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
