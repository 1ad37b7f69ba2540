"""Kernels compiled in parallel processes, and kernels that differ from the product's in one thing, made without touching it: for
what takes techniques away, and for what measures inside."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rawattn import compiler
from rawattn import device as devices
from rawattn.compiler import Binary, Source
from rawattn.errors import CompileError
from rawattn.problem import Problem

PATCHES = pathlib.Path(__file__).parent / "ablations"


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
    """Why a compiled kernel is not fit to be timed: spills, or wgmma that ptxas serialized. Empty where there is nothing."""
    return ", ".join([*([f"{binary.spill_bytes} bytes spilled"] if binary.spill_bytes else []), *binary.advisories])


def without_lse(problem: Problem) -> Problem:
    """The problem that a plain call poses."""
    return dataclasses.replace(problem, return_lse=False)


def patch(source: Source, text: str) -> Source:
    """A source changed by a unified diff, whose line numbers count for nothing: what a hunk removes must be there once.

    Raises ValueError where it is not, or where the diff is of a file that the source has not.
    """
    texts = {source.name: source.text, **dict(source.headers)}
    for part in re.split(r"^--- a/cuda_src/", text, flags=re.MULTILINE)[1:]:
        path, _, body = part.partition("\n")
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]:
            old, new = ("".join(line[1:] + "\n" for line in hunk.splitlines() if line[:1] in keep) for keep in (" -", " +"))
            if (times := texts.get(path, "").count(old)) != 1:
                raise ValueError(f"{path} has not once, but {times} times:\n{old}")
            texts[path] = texts[path].replace(old, new)
    headers = tuple((path, texts[path]) for path, _ in source.headers)
    return dataclasses.replace(source, text=texts[source.name], headers=headers)


def altered(kernel: Any, *patches: str, **replaced: Callable[..., Any]) -> Any:
    """A copy of a kernel's module, of patched sources, whose functions see each other's replacements, also those of an altered
    kernel that is altered again. A replacement is given the result of the original, and its arguments.

    >>> altered(attn_fwd, "static_order", values=lambda found, problem, config, device: {**found, "l2_head_group": 1})
    """
    original, before = getattr(kernel, "altered_from", (kernel, []))
    copy = types.ModuleType(kernel.__name__)
    for name, value in vars(original).items():
        if isinstance(value, types.FunctionType) and value.__globals__ is vars(original):
            value = types.FunctionType(value.__code__, vars(copy), name, value.__defaults__)
        setattr(copy, name, value)
    changes = [*before, *replaced.items()]
    for text in ((PATCHES / f"{name}.patch").read_text() for name in patches):
        changes.append(("render", lambda source, *_, text=text: patch(source, text)))
    for name, change in changes:
        setattr(copy, name, _changed(getattr(copy, name), change))
    vars(copy)["altered_from"] = original, changes
    return copy


def _changed(function: Callable[..., Any], change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: change(function(*given), *given)
