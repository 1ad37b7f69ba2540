"""Times each launch of a call, in order: the passes of gradients, what folds or adds parts.

python -m perf.launches wide-bwd/0                          the library's choice
python -m perf.launches wide-bwd/0 ours:attn_bwd_wide/128x32 ours:attn_bwd_wide/128x32pai2

Bursts as perf.bench has them, median of the rounds. A launch begins when the one before it has ended, so their sum is a little
more than the call takes. Passes of one kernel have one name: they stand in the order of their launches (``rawattn.explain``).
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from rawattn.command import timing
from rawattn.driver import context
from rawattn.driver.launch import BoundLaunch

from .lib import backward, command, machine, ours, report, sets
from .lib.task import Task


@contextlib.contextmanager
def watched(begin: Callable[[BoundLaunch], None]) -> Iterator[None]:
    """Calls ``begin`` before each launch that the body issues."""
    issue = BoundLaunch.__call__

    def call(launch: BoundLaunch) -> None:
        begin(launch)
        issue(launch)

    with mock.patch.object(BoundLaunch, "__call__", call):
        yield


def name_of(launch: BoundLaunch) -> str:
    """The kernel and its grid."""
    return f"{context.call('cuFuncGetName', launch._handle).decode()} x {launch._config.gridDimX}"


def burst(run: Callable[[], Any], torch: Any) -> tuple[list[BoundLaunch], list[float]]:
    """The launches of a call that was run before, and the microseconds of each."""
    launches: list[BoundLaunch] = []
    events: list[Any] = []

    def mark() -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    def begin(launch: BoundLaunch) -> None:
        launches.append(launch)
        mark()

    torch.cuda.synchronize()
    time.sleep(timing.BURST.before)
    torch.cuda._sleep(int(1000 * timing.SPIN_CYCLES_PER_US))  # the launches queue up behind it
    with watched(begin):
        run()
    mark()
    torch.cuda.synchronize()
    return launches, [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]


def measure(run: Callable[[], Any], torch: Any) -> list[tuple[BoundLaunch, float]]:
    """Each launch with its median."""
    launches, times = zip(*(burst(run, torch) for _ in range(timing.BURST.rounds)), strict=True)
    return [(launch, statistics.median(of)) for launch, *of in zip(launches[0], *times, strict=True)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("launches", __doc__, out=False)
    parser.add_argument("case", help="SET/NUMBER, or a case as JSON")
    parser.add_argument("names", nargs="*", default=["ours"], help="contenders of perf.bench")
    options = parser.parse_args(argv)
    machine.gpu("launches")
    import torch

    case = sets.pick(options.case)
    make, rows = backward.ours if sets.is_backward(case) else ours.ours, [["contender", "launch", "us", "TFLOP/s of the call"]]
    for name in options.names:
        run = make(Task.make(case), name).run
        for _ in range(3):
            run()
        found = measure(run, torch)
        total = sum(us for _, us in found)
        rows += [[name, name_of(launch), f"{us:.1f}", ""] for launch, us in found]
        rows.append([name, "together", f"{total:.1f}", f"{sets.flops(case) / total / 1e6:.0f}"])
    print(f"{sets.label(case)}\n{report.table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
