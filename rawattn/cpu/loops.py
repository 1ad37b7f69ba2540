"""The loops of lanes.py: compiled when they are first called, told of options by numbers, and run in threads.

Threads live for one call: the pools of OpenMP and TBB, which outlive it, would compete with torch's for the cores, and fail after
a fork or under concurrent calls.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..compile.cache import private_folder, touch, warn_uncached
from ..compile.compiler import sole_process
from ..errors import UnsupportedError
from ..reference.formula import Dropped
from ..variant.element import ELEMENTS, Element
from ..variant.mask import Pairs
from ..variant.offset import OffsetScore
from ..variant.score import Scale, Score, Softcap
from .units import Array


def cap_of(mask: Pairs, score: Score) -> float | None:
    """The cap that the loops are told of, 0 where logits are scaled dot products; None where they do not know the score, or a
    query may keep several runs of keys."""
    base: Any = score.base if isinstance(score, OffsetScore) else score
    if mask.keep is not None or type(base).logit not in (Scale.logit, Softcap.logit):
        return None
    return base.cap if isinstance(base, Softcap) else 0.0


class CompiledLoops(NamedTuple):
    """The compiled loops, the seconds it took to get them, and whether they came from the cache folder."""

    loops: Any
    seconds: float
    cached: bool


_loading = threading.Lock()


def load(element: Element, name: str = "attend") -> CompiledLoops:
    """The loops of that name in lanes.py, "attend" or "backward", for an element. The first call compiles them, which takes
    seconds and shows a spinner on a terminal, or reads them from the cache folder; later calls cost nothing."""
    compiled = _loaded.get((element.name, name))
    if compiled is None:
        number = np.dtype(element.lse_dtype).name
        with _loading:
            compiled = _load(name, number, storage_of(element).name if name == "attend" else number)
        _loaded[element.name, name] = compiled
    return compiled


_loaded: dict[tuple[str, str], CompiledLoops] = {}


@functools.cache
def _load(name: str, number: str, storage: str) -> CompiledLoops:
    start = time.perf_counter()
    with _spinner(f"compiling the CPU kernel {name} for {storage}, once"):
        loops = _compile(name, number, storage)
    return CompiledLoops(loops, time.perf_counter() - start, bool(loops.stats.cache_hits))


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
        folder = private_folder("numba", f"{name}-{storage}-{lanes.MACHINE}")
        tempfile.TemporaryFile(dir=folder).close()  # Numba says nothing of a folder that it cannot write
        for entry in folder.rglob("*.nb[ci]"):
            touch(entry)
        with sole_process(folder, "00"):
            try:
                return lanes.compile(name, number, storage, folder)
            except OSError:  # a full disk
                raise
            except Exception:  # an entry is damaged
                for entry in folder.rglob("*.nb[ci]"):
                    entry.unlink(missing_ok=True)
                return lanes.compile(name, number, storage, folder)
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


def storage_of(element: Element) -> np.dtype[Any]:
    """Returns the dtype in which the loops see k and v: 16-bit formats are seen as their bits."""
    return np.dtype(np.uint16) if element.itemsize == 2 else np.dtype(element.dtype)


@functools.cache
def table_of(element: Element) -> Array:
    """The number that each 16-bit pattern means; empty for other formats."""
    patterns = np.arange(1 << 16 if element.itemsize == 2 else 0, dtype=np.uint16)
    return patterns.astype(storage_of(element)).view(element.dtype).astype(element.lse_dtype)


def element_of(x: Array) -> Element:
    return _BY_DTYPE[x.dtype]


_BY_DTYPE = {np.dtype(element.dtype): element for element in ELEMENTS.values()}


def in_threads(threads: int, units: list[Any], compute: Callable[[Any], None]) -> None:
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


def dropout_of(dropped: Dropped | None) -> Array:
    """Returns what the loops are told of dropout."""
    return NOTHING_DROPPED if dropped is None else np.array((dropped.option.threshold, dropped.seed, *dropped.offsets), np.int64)


NOTHING_DROPPED = np.zeros(4, np.int64)
