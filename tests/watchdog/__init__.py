"""``pytest --watchdog SECONDS``: a GPU test that hangs ends, and says who waits for what.

Kernels are compiled with waits that lose their patience (patience.cuh): after SECONDS a thread leaves a note with its block, warp
and lane, the barrier and its parity, or whose turn it is in args.turns; after twice that the kernel ends, and with it the context
of the device and the session. The failed test shows the notes, barriers by their names in ``Smem``. These kernels are slower. A
test that takes ten minutes all the same ends the process, with its name and where its threads are."""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import os
import re
import sys
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from rawattn.compile import compiler
from rawattn.compile.compiler import Source
from rawattn.kernel import render

PATIENCE = Path(__file__).with_name("patience.cuh")
INCLUDE = ('#include "ptx/base.cuh"', '#include "ptx/patience.cuh"')
WAIT = ("while (!done)", "for (Patience patience; !done; patience.await_barrier(smem_address(this), parity))")
TURN = (
    "do count = ptx::load_acquire(args.turns + place);",
    "ptx::Patience patience;\n        do count = ptx::load_acquire(args.turns + place), patience.await_turn(place, count);",
)
ASKED_TURN = (
    "while (!turn.has_come(asked))",
    "for (ptx::Patience patience; !turn.has_come(asked); patience.await_turn(place, asked))",
)
EDITS: Mapping[str, tuple[tuple[str, str], ...]] = {  # of every file in which a thread waits for another
    "ptx/mbarrier.cuh": (WAIT, INCLUDE),
    "ptx/cp_async_mbarrier.cuh": (WAIT,),
    "ptx/turn.cuh": (INCLUDE,),
    "variant/dq/ordered.cuh": (TURN,),
    "variant/dq/red_ordered.cuh": (ASKED_TURN,),
}
NOTES = 4096  # that there is room for: of all warps of a GPU
TOLD = 64  # of them, in words
LONGEST = 600  # seconds of a test
LOST = re.compile("LAUNCH_FAILED|LaunchFailure|launch fail", re.IGNORECASE)
PATIENT: list[Source] = []  # sources that were made, by their numbers in notes less 1
_SMEM = re.compile(r"^struct Smem \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)


class Note(NamedTuple):
    """This is what a thread left: the number of its kernel; 0 for a barrier, 1 for a turn; where it was; the barrier's place in
    shared memory, or that of the turn; the parity, or whose turn it is."""

    kernel: int
    kind: int
    block: int
    thread: int
    what: int
    seen: int


def watched(source: Source, seconds: float, page: int) -> Source:
    """A source whose waits last so long, with notes in the memory at ``page``. Raises ValueError where a wait is not as it is
    known."""
    headers = dict(source.headers)
    for path in EDITS.keys() & headers.keys():
        for old, new in EDITS[path]:
            if (times := headers[path].count(old)) != 1:
                raise ValueError(f"{path} has not once, but {times} times: {old} (tests/watchdog edits it).")
            headers[path] = headers[path].replace(old, new)
    if headers == dict(source.headers):
        return source
    PATIENT.append(source)
    numbers = {"PATIENCE": f"u64({int(seconds * 1e9)})", "PAGE": f"{page}ull", "NOTES": NOTES, "KERNEL": len(PATIENT)}
    text = PATIENCE.read_text(encoding="utf-8")
    headers["ptx/patience.cuh"] = re.sub(r"\b(PATIENCE|PAGE|NOTES|KERNEL)\b", lambda found: str(numbers[found[0]]), text)
    return dataclasses.replace(source, headers=tuple(sorted(headers.items())))


def members(text: str) -> list[str]:
    """The names of what a kernel's file has in ``struct Smem``, in order."""
    found = _SMEM.search(text)
    body = re.sub(r"//[^\n]*|<[^<>]*>|\[[^\]]*\]|alignas\([^)]*\)", "", found[1]) if found else ""
    own = [statement for statement in body.split(";") if not statement.lstrip().startswith("using ")]
    return [part.split()[-1] for statement in own for part in statement.split(",") if part.strip()]


@functools.lru_cache(maxsize=16)
def places(source: Source) -> dict[str, int]:
    """Returns where each member of ``struct Smem`` begins, as the compiler lays it out, which writes the numbers into the
    machine code."""
    names = members(source.text)
    table = ", ".join(f"__INTADDR__(&((Smem*)0)->{name})" for name in names)  # __builtin_offsetof is new in NVRTC 13.5
    mark = 0x7AC4D06E57A7E5  # before the numbers
    text = f'\nextern "C" __device__ unsigned long long watched_places[] = {{{mark}ull, {table or 0}}};\n'
    cubin = compiler.compile(dataclasses.replace(source, text=source.text + text)).cubin
    begin = cubin.index(mark.to_bytes(8, "little")) + 8
    return dict(zip(names, np.frombuffer(cubin, "<u8", len(names), begin).tolist(), strict=True))


def words(note: Note) -> str:
    """A note as a line."""
    source, warp, lane = PATIENT[note.kernel - 1], *divmod(note.thread, 32)
    where = f"{source.name}: block {note.block}, warp {warp}, lane {lane} waits"
    if note.kind == 1:
        return f"{where} for its turn at place {note.what} of args.turns, which says {note.seen}"
    begins = {name: begin for name, begin in places(source).items() if begin <= note.what}
    name = max(begins, key=begins.__getitem__, default="shared memory")
    return f"{where} for parity {note.seen} of {name}, {(note.what - begins.get(name, 0)) // 8} barriers on"


class Page:
    """The memory of the notes, which the device writes and the host reads, also when the device's context is lost."""

    def __init__(self) -> None:
        import cupy

        self.memory: Any = cupy.cuda.alloc_pinned_memory(NOTES * 32)
        self.numbers: npt.NDArray[np.int32] = np.frombuffer(self.memory, np.int32, NOTES * 8).reshape(NOTES, 8)
        self.numbers[:] = 0

    def take(self) -> list[Note]:
        """The notes that were left since, those on turns first: who waits for a turn has others wait for barriers."""
        found = [Note(*map(int, each[:6])) for each in self.numbers if each[0]]
        self.numbers[:] = 0
        return sorted(found, key=lambda note: (-note.kind, note))

    def told(self) -> list[str]:
        """The same as lines."""
        found = self.take()
        return [*map(words, found[:TOLD]), *([f"and {len(found) - TOLD} more"] if len(found) > TOLD else [])]


page = functools.cache(Page)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--watchdog", type=float, metavar="SECONDS", help="end GPU tests that hang, and say who waits for what")


def pytest_configure(config: pytest.Config) -> None:
    seconds = config.getoption("watchdog")
    if seconds is not None:
        start(seconds)


def start(seconds: float) -> None:
    """From here on kernels are patient no longer than that."""
    render.Source = lambda **fields: watched(Source(**fields), seconds, page().memory.ptr)  # type: ignore[assignment, misc]


def give_up(item: pytest.Item) -> None:
    """Ends the process in words: nothing else ends a thread that waits for a GPU."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(
        f"\nwatchdog: {item.nodeid} has taken {LONGEST} s. The process ends.",
        *page().told(),
        sep="\n",
        file=sys.stderr,
    )
    faulthandler.dump_traceback()
    sys.stderr.flush()
    os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.config.getoption("watchdog") is None or item.get_closest_marker("gpu") is None:
        return (yield)
    timer = threading.Timer(LONGEST, give_up, [item])
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.config.getoption("watchdog") is not None and call.excinfo is not None and LOST.search(str(call.excinfo.value)):
        lines = page().told() or ["A kernel ended, and no thread left a note: it was no wait."]
        report.sections.append(("watchdog", "\n".join(lines)))
        item.session.shouldstop = "the device's context is lost with the kernel that ended"
    return report
