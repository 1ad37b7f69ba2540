"""Compilation in parallel processes, into the cache that the library reads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from typing import Any

from rawattn import compiler
from rawattn.compiler import Binary, Source
from rawattn.device import Device
from rawattn.errors import CompileError
from rawattn.problem import Problem


def without_lse(problem: Problem) -> Problem:
    """The problem that a plain call poses."""
    return dataclasses.replace(problem, return_lse=False)


def cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


class Pool:
    """Worker processes that compile; results come as they are done. Leaving the ``with`` block drops what is pending."""

    def __init__(self, workers: int | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = concurrent.futures.ProcessPoolExecutor(workers or max(1, cores() - 1), mp_context=context)
        self._futures: dict[concurrent.futures.Future[Binary], str] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, sources: Iterable[Source]) -> int:
        """Starts compiling each different source; gives how many these are."""
        different = {source.key: source for source in sources}
        self._futures |= {self._executor.submit(compiler.compile, source): key for key, source in different.items()}
        return len(different)

    def drop(self) -> None:
        """Forgets what was submitted and not yet given."""
        for future in self._futures:
            future.cancel()
        self._futures.clear()

    def results(self) -> Iterator[tuple[str, Binary | CompileError]]:
        """Each submitted source's key with its binary, or with NVRTC's refusal, as they are done."""
        for future in concurrent.futures.as_completed(self._futures):
            try:
                yield self._futures[future], future.result()
            except CompileError as error:
                yield self._futures[future], error
        self._futures.clear()


def faults(binary: Binary) -> str:
    """Why a compiled kernel is not fit to be timed: spills, or wgmma that ptxas serialized. Empty where there is nothing."""
    found = [f"{binary.spill_bytes} bytes spilled"] if binary.spill_bytes else []
    return ", ".join([*found, *binary.advisories])


def source_of(kernel: Any, problem: Problem, config: Any) -> Source:
    return kernel.render(without_lse(problem), config)


def all_candidates(kernels: Iterable[Any], problem: Problem, device: Device) -> list[tuple[Any, Any]]:
    """(kernel, config) of every legal configuration of every kernel that supports the problem."""
    served = [kernel for kernel in kernels if kernel.supports(problem, device) is None]
    return [(kernel, config) for kernel in served for config in kernel.candidates(problem, device)]
