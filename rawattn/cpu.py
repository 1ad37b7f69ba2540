"""The CPU path: blocked attention with an online softmax, on all cores.

Work is cut into units: one sequence, one head of k and v, and some queries of all heads that share it. Threads take units off a
list, and ``lanes.attend`` computes one without the GIL. A unit's result depends on its own rows and keys alone, so it is the same
bits whatever the threads do. Threads live for one call: the pools of OpenMP and TBB, which outlive it, would compete with torch's
for the cores, and fail after a fork or under concurrent calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .cache import private_folder, warn_uncached
from .device import Device
from .errors import ProblemError
from .operand import Layout
from .operation import Forward as Problem
from .variant.element import Element
from .variant.mask import kept_pairs
from .variant.score import Scale, Softcap

name = "cpu"

# For the cost model: one core of an EPYC 7003 (Zen 3, AVX2).
PRODUCTS_PER_SECOND = 36e9  # in float32; half in float64
SECONDS_PER_NUMBER = {"fp64": 1.2e-9, "fp32": 0.8e-9, "fp16": 1.5e-9, "bf16": 1.5e-9}  # of k and v, to bring in
SECONDS_PER_UNIT = 40e-6
SECONDS_PER_THREAD = 80e-6

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a unit (queries times heads that share k and v), keys of a step, threads."""

    tile_q: int = 256
    tile_kv: int = 96
    threads: int = 1


def runs_on(device: Device) -> bool:
    """Whether the device is one that this computes on."""
    return device.is_cpu


def supports(problem: Problem, device: Device) -> str | None:
    """None if this kernel computes the problem on the device, else the reason why not."""
    if not device.is_cpu:
        return f"it runs on the CPU, and the arrays are on {device.name}"
    for which in ("head_dim", "head_dim_v"):
        if getattr(problem, which) > 1024:
            return f"{which} is {getattr(problem, which)}; it takes up to 1024"
    if not isinstance(problem.score, (Scale, Softcap)):
        return f"it takes the scores Scale and Softcap, not {type(problem.score).__name__}"
    if problem.sinks:
        return "it has no sinks yet"
    if problem.constant_time:
        return "a CPU takes longer for some numbers, such as subnormal ones; constant_time is for GPUs"
    return None


def legal(config: Config, problem: Problem, device: Device) -> str | None:
    """None if the configuration can run the problem, else the reason why not."""
    for which, value in dataclasses.asdict(config).items():
        if not isinstance(value, int) or not 1 <= value <= 4096:
            return f"{which} is {value!r}; it must be an int from 1 to 4096"
    return None


def tuning_shapes(problem: Problem) -> tuple[Problem, ...]:
    """The problems by which configurations are compared: itself, since its loops are compiled once for all configurations."""
    return (problem,)


def candidates(problem: Problem, device: Device) -> list[Config]:
    """The configurations worth comparing."""
    tile_kv = 96 if problem.head_dim + problem.head_dim_v <= 512 else 48  # so that its keys and values stay in the L2 cache
    threads = {min(1 << i, device.sm_count) for i in range(device.sm_count.bit_length() + 1)}
    return [Config(tile_q, tile_kv, count) for tile_q in (512, 256, 128, 64, 32, 16) for count in sorted(threads)]


def cost(config: Config, problem: Problem, device: Device) -> float:
    """Estimated seconds: the units that fall to one thread, and the start of the threads."""
    queries, batch = _queries(config, problem), max(1, problem.batch)
    kept = kept_pairs(problem.mask, problem.q_len, problem.kv_len) / max(1, problem.q_len)
    fetched, used = (min(problem.kv_len, kept + (rows + config.tile_kv) / 2) for rows in (queries, 16))
    rows = math.ceil(min(queries, problem.q_len) * problem.heads_per_kv / 16) * 16
    rate = PRODUCTS_PER_SECOND / (2 if problem.element.name == "fp64" else 1)
    unit = (problem.head_dim + problem.head_dim_v) * (used * rows / rate + fetched * SECONDS_PER_NUMBER[problem.element.name])
    units = problem.batch * problem.kv_heads * math.ceil(problem.total_q / batch / queries)
    threads = max(1, min(config.threads, units))
    return math.ceil(units / threads) * (SECONDS_PER_UNIT + unit) + (threads - 1) * SECONDS_PER_THREAD


def _queries(config: Config, problem: Problem) -> int:
    """Queries of a unit."""
    return max(1, config.tile_q // problem.heads_per_kv)


class Kernel(NamedTuple):
    """The compiled loops, the seconds it took to get them, and whether they came from the cache folder."""

    attend: Any
    seconds: float
    cached: bool


_loading = threading.Lock()


def load(element: Element) -> Kernel:
    """The kernel of an element. The first call compiles it, which takes seconds and shows a spinner on a terminal, or reads it
    from the cache folder; later calls cost nothing."""
    with _loading:
        return _load(np.dtype(element.lse_dtype).name, _storage(element).name)


@functools.cache
def _load(number: str, storage: str) -> Kernel:
    start = time.perf_counter()
    with _spinner(f"compiling the CPU kernel for {storage}, once"):
        attend = _compile(number, storage)
    return Kernel(attend, time.perf_counter() - start, bool(attend.stats.cache_hits))


def _compile(number: str, storage: str) -> Any:
    """The compiled loops, kept in the cache folder where that can be used; a warning says so where it cannot."""
    from . import lanes

    try:
        own = private_folder("numba", f"{storage}-{lanes.MACHINE}")
        tempfile.TemporaryFile(dir=own).close()  # Numba says nothing of a folder that it cannot write
        try:
            return lanes.compile(number, storage, own)
        except OSError:  # a full disk
            raise
        except Exception:  # an entry is damaged
            for entry in own.rglob("*.nb[ci]"):
                entry.unlink(missing_ok=True)
            return lanes.compile(number, storage, own)
    except OSError as error:
        warn_uncached(error)
        return lanes.compile(number, storage, None)


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
    """How the loops see k and v: 16-bit formats as their bits."""
    return np.dtype(np.uint16) if element.itemsize == 2 else np.dtype(element.dtype)


@functools.cache
def _table(element: Element) -> Array:
    """The number that each 16-bit pattern means; empty for other formats."""
    patterns = np.arange(1 << 16 if element.itemsize == 2 else 0, dtype=np.uint16)
    return patterns.astype(_storage(element)).view(element.dtype).astype(element.lse_dtype)


class _Sequence(NamedTuple):
    """Arrays without their batch dimension, and which keys each query keeps."""

    q: Array
    k: Array
    v: Array
    o: Array
    lse: Array | None  # (heads, q_len)
    begin: Array
    end: Array


class _Unit(NamedTuple):
    sequence: _Sequence
    kv_head: int
    queries: slice
    keys: int  # that it visits, more or less


def _compute(problem: Problem, config: Config, attend: Any, unit: _Unit) -> None:
    sequence, kv_head, queries, _ = unit
    group, number, storage = problem.heads_per_kv, problem.element.lse_dtype, _storage(problem.element)
    heads = slice(kv_head * group, (kv_head + 1) * group)
    cap = problem.score.cap if isinstance(problem.score, Softcap) else 0.0
    scale = problem.scale / cap if cap else problem.scale
    q = sequence.q[queries, heads].astype(number, order="C").reshape(-1, problem.head_dim)
    k, v = (x[:, kv_head].view(storage) for x in (sequence.k, sequence.v))
    begin, end = (np.repeat(bound[queries], group) for bound in (sequence.begin, sequence.end))
    o, lse = np.empty((len(q), problem.head_dim_v), number), np.empty(len(q), number)
    attend(q, k, v, begin, end, scale, cap, config.tile_kv, _table(problem.element), o, lse)
    sequence.o[queries, heads] = o.reshape(-1, group, problem.head_dim_v)
    if sequence.lse is not None:
        sequence.lse[heads, queries] = lse.reshape(-1, group).T


def _ends(name: str, cu_seqlens: Array, rows: int) -> list[int]:
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends != sorted(ends) or ends[-1] > rows:
        raise ProblemError(f"{name} is {ends}; it must start with 0, never fall, and end with the {rows} rows or before.")
    return ends


def run(
    problem: Problem, config: Config, q: Array, k: Array, v: Array, o: Array, lse: Array | None = None,
    cu_seqlens_q: Array | None = None, cu_seqlens_kv: Array | None = None,
) -> None:  # fmt: skip
    """Computes the problem on NumPy arrays of its shapes, writing o and lse in place. Last dimensions are contiguous.

    Raises ProblemError where cu_seqlens do not describe sequences of these arrays.
    """
    attend, step, units = load(problem.element).attend, _queries(config, problem), []
    interval = functools.cache(lambda q_len, kv_len: problem.mask.interval(np.arange(q_len), q_len, kv_len))
    ends = None
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        ends = _ends("cu_seqlens_q", cu_seqlens_q, len(q)), _ends("cu_seqlens_kv", cu_seqlens_kv, len(k))
    for i in range(problem.batch):
        rows, keys = (i, i) if ends is None else (slice(*side[i : i + 2]) for side in ends)
        lse_i = None if lse is None else lse[i] if ends is None else lse[:, rows]
        sequence = _Sequence(q[rows], k[keys], v[keys], o[rows], lse_i, *interval(len(q[rows]), len(k[keys])))
        for first in range(0, len(sequence.q), step):
            last = min(first + step, len(sequence.q))
            visits = int(sequence.end[last - 1] - sequence.begin[first])
            units += [_Unit(sequence, kv_head, slice(first, last), visits) for kv_head in range(problem.kv_heads)]
    units.sort(key=lambda unit: -unit.keys)  # the longest first, so that the threads end together
    queue = iter(units)

    def work() -> None:
        try:
            for unit in queue:
                _compute(problem, config, attend, unit)
        finally:  # after an error nothing is left for the others to do
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


class Cpu:
    """The CPU path as a kernel: it is compiled by Numba and has no launches."""

    name = name
    alignment = 1
    config_type = Config
    runs_on = staticmethod(runs_on)
    legal = staticmethod(legal)
    candidates = staticmethod(candidates)
    cost = staticmethod(cost)
    tuning_shapes = staticmethod(tuning_shapes)
    run = staticmethod(run)

    def supports(self, op: Problem, device: Device) -> list[str]:
        """The reasons why the CPU path does not compute the operation; none where it does."""
        reason = supports(op, device)
        return [] if reason is None else [reason]

    def layout_reason(self, layout: Layout) -> str | None:
        """None: it reads whatever NumPy reads."""
        return None


CPU = Cpu()
