"""Kernels compiled in parallel processes, and what is wrong with a compiled one."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Iterable, Iterator

from rawattn.compile import compiler
from rawattn.compile.compiler import Binary, Source
from rawattn.driver import device as devices
from rawattn.errors import CompileError


class Pool:
    """Worker processes that compile into the cache. Leaving the ``with`` block drops what is pending."""

    def __init__(self, workers: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = concurrent.futures.ProcessPoolExecutor(workers or max(1, devices.cpu().sm_count - 1), context)
        self._keys: dict[concurrent.futures.Future[Binary], str] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, sources: Iterable[Source]) -> int:
        """Starts compiling each different source; gives how many these are."""
        different = {source.key: source for source in sources}
        self._keys |= {self._executor.submit(compiler.compile, source): key for key, source in different.items()}
        return len(different)

    def drop(self) -> None:
        """Forgets what was submitted and not yet given."""
        for future in self._keys:
            future.cancel()
        self._keys.clear()

    def results(self) -> Iterator[tuple[str, Binary | CompileError]]:
        """The key of each submitted source with its binary, or with NVRTC's refusal, as they are done."""
        for future in concurrent.futures.as_completed(self._keys):
            error = future.exception()
            yield self._keys[future], error if isinstance(error, CompileError) else future.result()
        self._keys.clear()


def faults(binary: Binary) -> str:
    """Says why a compiled kernel is not fit to be timed: spills, or wgmma that ptxas serialized. Empty if it is fit."""
    return ", ".join([*([f"{binary.spill_bytes} bytes spilled"] if binary.spill_bytes else []), *binary.advisories])
