"""The CPU path: blocked attention with an online softmax, on all cores. What it can do, how it may be configured, and its run.

Work is cut into units: one sequence, one head of k and v, and some queries of all the heads that share it. Threads take units
off one list, and ``lanes.attend`` computes a unit without the GIL. A unit's result depends on nothing but its own rows and keys,
so it is the same bits whatever the threads do. The threads live for one call: the pools of OpenMP and TBB, which outlive it,
would spin against those of torch and fail under concurrent calls or after a fork.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .compiler import cache_folder
from .device import Device
from .problem import Problem
from .variant.element import Element
from .variant.mask import kept_pairs
from .variant.score import Scale, Softcap

name = "cpu"

# Measured on one core of a 3.4 GHz EPYC 7003 (AVX2), for the cost model.
PRODUCTS_PER_SECOND = 40e9  # multiply-adds in float32; half in float64
SECONDS_PER_NUMBER = {"fp64": 0.7e-9, "fp32": 0.5e-9, "fp16": 2e-9, "bf16": 2e-9}  # of k and v, to bring a tile into reach
SECONDS_PER_UNIT = 40e-6
SECONDS_PER_THREAD = 80e-6

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a unit (queries times the heads that share k and v), keys of a step, and threads."""

    tile_q: int = 256
    tile_kv: int = 96
    threads: int = 1


def supports(problem: Problem, device: Device) -> str | None:
    """None if this kernel computes the problem on the device, else the reason why not."""
    if not device.is_cpu:
        return f"it runs on the CPU, and the arrays are on {device.name}"
    for which in ("head_dim", "head_dim_v"):
        if getattr(problem, which) > 1024:
            return f"{which} is {getattr(problem, which)}; it takes up to 1024"
    if not isinstance(problem.score, (Scale, Softcap)):
        return f"it takes the scores Scale and Softcap, not {type(problem.score).__name__}"
    return None


def legal(config: Config, problem: Problem, device: Device) -> str | None:
    """None if the configuration can run the problem, else the reason why not."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, int) or not 1 <= value <= 4096:
            return f"{field.name} is {value!r}; it must be an int from 1 to 4096"
    return None


def candidates(problem: Problem, device: Device) -> list[Config]:
    """The configurations worth comparing."""
    tile_kv = 96 if problem.head_dim + problem.head_dim_v <= 512 else 48
    return [Config(tile_q, tile_kv, threads) for tile_q in (256, 128, 64, 32, 16) for threads in {1, device.units}]


def cost(config: Config, problem: Problem, device: Device) -> float:
    """Estimated seconds: of the units that one thread gets, and of starting the threads."""
    queries = _queries(config, problem)
    q_len = problem.total_q / max(1, problem.batch)
    kept = kept_pairs(problem.mask, problem.q_len, problem.kv_len) / max(1, problem.q_len)
    keys = kept if kept > 0.99 * problem.kv_len else min(problem.kv_len, kept + (queries + config.tile_kv) / 2)
    units = problem.batch * problem.kv_heads * math.ceil(q_len / queries)
    rows = math.ceil(min(queries, problem.q_len) * problem.heads_per_kv / 16) * 16
    rate = PRODUCTS_PER_SECOND / (2 if problem.element.name == "fp64" else 1)
    per_key = (problem.head_dim + problem.head_dim_v) * (rows / rate + SECONDS_PER_NUMBER[problem.element.name])
    threads = min(config.threads, units)
    return math.ceil(units / max(1, threads)) * (SECONDS_PER_UNIT + keys * per_key) + (threads - 1) * SECONDS_PER_THREAD


class Kernel(NamedTuple):
    """The compiled loops for an element, what it took to get them, and whether they came from the cache folder."""

    attend: Any
    number: npt.DTypeLike  # what is computed with
    storage: npt.DTypeLike  # how the loops see k and v: 16-bit formats as their bits
    table: Array  # the float32 of every 16-bit pattern; empty for other elements
    seconds: float
    cached: bool


_loading = threading.Lock()


def load(element: Element) -> Kernel:
    """The kernel of an element. The first call compiles it, which takes seconds and shows a spinner on a terminal, or finds it in
    the cache folder; later calls cost nothing."""
    number = np.dtype(element.lse_dtype)
    storage = np.dtype(np.uint16) if element.itemsize == 2 else number
    with _loading:
        attend, seconds, cached = _loops(number.name, storage.name)
        return Kernel(attend, number, storage, _table(element) if element.itemsize == 2 else np.zeros(0, number), seconds, cached)


@functools.cache
def _table(element: Element) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(element.dtype).astype(np.float32)


@functools.cache
def _loops(number: str, storage: str) -> tuple[Any, float, bool]:
    start, folder = time.perf_counter(), cache_folder() / "numba"
    with _spinner(f"compiling the CPU kernel for {storage} (once; kept in {folder})"):
        from . import lanes

        try:
            attend = lanes.compile(number, storage, folder)
        except Exception:  # a damaged entry, a full folder: start afresh next time, and do without now
            shutil.rmtree(folder, ignore_errors=True)
            attend = lanes.compile(number, storage, None)
    return attend, time.perf_counter() - start, bool(attend.stats.cache_hits)


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    """Shows the text on stderr, if that is a terminal, once the body has taken a second."""
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


class _Sequence(NamedTuple):
    """Arrays without their batch dimension, and which keys each query keeps."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array | None  # (heads, q_len)
    begin: Array
    end: Array


def _sequences(
    problem: Problem, q: Array, k: Array, v: Array, o: Array, lse: Array | None, cu: list[Array]
) -> Iterator[_Sequence]:
    interval = functools.cache(lambda q_len, kv_len: problem.mask.interval(np.arange(q_len), q_len, kv_len))
    for i in range(problem.batch):
        if cu:
            rows, keys = (slice(int(c[i]), int(c[i + 1])) for c in cu)
            parts = q[rows], k[keys], v[keys], o[rows], None if lse is None else lse[:, rows]
        else:
            parts = q[i], k[i], v[i], o[i], None if lse is None else lse[i]
        yield _Sequence(*parts, *interval(len(parts[0]), len(parts[1])))


def _queries(config: Config, problem: Problem) -> int:
    """Queries of a unit."""
    return max(1, config.tile_q // problem.heads_per_kv)


def _compute(problem: Problem, config: Config, kernel: Kernel, sequence: _Sequence, kv_head: int, queries: slice) -> None:
    """One unit."""
    group = problem.heads_per_kv
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q = sequence.q[queries, heads].astype(kernel.number, order="C").reshape(-1, problem.head_dim)
    k, v = sequence.k[:, kv_head], sequence.v[:, kv_head]
    begin, end = (np.repeat(bound[queries], group) for bound in (sequence.begin, sequence.end))
    o, lse = np.empty((len(q), problem.head_dim_v), kernel.number), np.empty(len(q), kernel.number)
    scale, cap = problem.scale * math.log2(math.e), 0.0
    if isinstance(problem.score, Softcap):
        scale, cap = 2 * scale / problem.score.cap, problem.score.cap * math.log2(math.e)
    kernel.attend(q, k.view(kernel.storage), v.view(kernel.storage), begin, end, scale, cap, config.tile_kv, kernel.table, o, lse)
    sequence.o[queries, heads] = o.reshape(-1, group, problem.head_dim_v)
    if sequence.lse is not None:
        sequence.lse[heads, queries] = lse.reshape(-1, group).T


def run(
    problem: Problem,
    config: Config,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
) -> None:
    """Computes the problem on NumPy arrays of its shapes, writing o and lse in place; their last dimensions are contiguous."""
    kernel, step = load(problem.element), _queries(config, problem)
    cu = [c for c in (cu_seqlens_q, cu_seqlens_kv) if c is not None]
    units = [
        (int(s.end[min(i + step, len(s.q)) - 1] - s.begin[i]), s, kv_head, slice(i, i + step))
        for s in _sequences(problem, q, k, v, o, lse, cu)
        for kv_head in range(problem.kv_heads)
        for i in range(0, len(s.q), step)
    ]
    units.sort(key=lambda unit: -unit[0])  # the longest first, so that the threads end together
    queue = iter(units)

    def work() -> None:
        try:
            for _, *unit in queue:
                _compute(problem, config, kernel, *unit)
        finally:  # after an error nothing is left to do for the others
            for _ in queue:
                pass

    helpers = min(config.threads, len(units)) - 1
    if helpers < 1:
        return work()
    with ThreadPoolExecutor(helpers) as pool:
        futures = [pool.submit(work) for _ in range(helpers)]
        work()
        for future in futures:
            future.result()
