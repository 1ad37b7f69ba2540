"""This module times calls: work of a GPU by two protocols, with CUDA events behind a spin, graph replay, and host clocks.

- burst: rounds of about 12 ms after 20 ms of rest, contenders interleaved, shuffled: the clock is high.
- sustained: each alone under load for a second after 0.3 s of warm-up, shuffled: power sets the clock, as in training.

A spin on the GPU goes ahead of each burst, so that launches queue up behind it and no launch cost enters. Calls too short for
events (a few microseconds of overhead each) are captured in a graph of ``GRAPH_LAUNCHES``, and the graph's replay is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

GRAPH_BELOW_US = 60.0  # calls shorter than this are timed in graphs
GRAPH_LAUNCHES = 20
MOST_ISSUES = 300  # in a burst: a stream takes about a thousand launches and events ahead
SPIN_CYCLES_PER_US = 1.98e3  # a lower clock spins longer, which does no harm

Rounds = list[list[float]]  # microseconds of each launch, by round
Context = Callable[[], contextlib.AbstractContextManager[Any]]  # around all runs of a call


@dataclasses.dataclass(frozen=True)
class Call:
    """A contender on a case: ``run`` issues the work and gives its output, which ``view`` puts in our order, and which is
    ``checked`` where it should be right. ``before`` makes what a call needs that is not timed with it."""

    run: Callable[[], Any]
    view: Callable[[Any], Any] = lambda output: output
    context: Context = contextlib.nullcontext
    detail: str = ""
    checked: bool = True
    before: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Load:
    """A call made ready to be timed: one ``issue`` is ``launches`` runs of it, each about ``us`` long."""

    issue: Callable[[], Any]
    context: Context
    us: float
    host_us: float  # of one issue
    launches: int = 1


@dataclasses.dataclass(frozen=True)
class TimingProtocol:
    """A protocol of ``rounds`` of all contenders, each of ``seconds``, with ``before`` seconds of rest (burst) or of warm-up
    (sustained)."""

    name: str
    rounds: int
    seconds: float
    before: float


BURST = TimingProtocol("burst", 5, 0.012, 0.020)
SUSTAINED = TimingProtocol("sustained", 3, 1.0, 0.3)
PROTOCOLS = {protocol.name: protocol for protocol in (BURST, SUSTAINED)}


def median_of_rounds(rounds: Sequence[Sequence[float]]) -> float:
    """Returns the median over rounds of each round's median, which one disturbed round moves little."""
    return float(np.median([np.median(samples) for samples in rounds]))


def race(clock: Clock, loads: dict[Any, Load], protocol: TimingProtocol, seed: int = 0) -> dict[Any, Rounds]:
    """Times each contender by round, in an order that is shuffled in every round."""
    times: dict[Any, Rounds] = {name: [] for name in loads}
    shuffle = random.Random(seed)
    for _ in range(protocol.rounds):
        for name in shuffle.sample(list(loads), len(loads)):
            measure = clock.burst if protocol.name == "burst" else clock.sustain
            with loads[name].context():
                times[name].append(measure(loads[name], protocol.seconds, protocol.before))
    return times


class Clock(Protocol):
    """A clock that times loads, as ``Gpu`` does."""

    def load(self, call: Call) -> Load:
        """Warms a call up, and estimates what it costs."""
        with call.context():
            call.run()
            load = Load(call.run, call.context, 1e9, 0.0)
            us = float(np.median(self.burst(load, 0.0)))
        return dataclasses.replace(load, us=us, host_us=us)

    def burst(self, load: Load, seconds: float, rest: float = 0.0) -> list[float]: ...

    def sustain(self, load: Load, seconds: float, warm_up: float) -> list[float]:
        """Returns microseconds of runs under load, as ``burst`` does where nothing warms up."""
        return self.burst(load, seconds, warm_up)


class Gpu:
    """The current CUDA device, by torch's events."""

    def __init__(self) -> None:
        import torch

        self.torch, self.device = torch, "cuda"

    def burst(self, load: Load, seconds: float, rest: float = 0.0) -> list[float]:
        """Returns microseconds of each launch, of as many issues as fill the seconds, at least three, after a rest."""
        self.torch.cuda.synchronize()
        time.sleep(rest)
        issues = int(np.clip(seconds * 1e6 / (load.us * load.launches), 3, MOST_ISSUES))
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(issues + 1)]
        self.torch.cuda._sleep(int(min(issues * (1.5 * load.host_us + 3) + 100, 30_000) * SPIN_CYCLES_PER_US))
        events[0].record()
        for event in events[1:]:
            load.issue()
            event.record()
        self.torch.cuda.synchronize()
        return [a.elapsed_time(b) * 1e3 / load.launches for a, b in itertools.pairwise(events)]

    def sustain(self, load: Load, seconds: float, warm_up: float) -> list[float]:
        """Returns microseconds of a launch, the mean of each 10 ms of load after warming up. The GPU never waits for the host."""
        issues = max(1, round(1e4 / (load.us * load.launches)))
        events = [self.torch.cuda.Event(enable_timing=True)]
        self.torch.cuda.synchronize()
        events[0].record()
        while len(events) < 4 or events[0].elapsed_time(events[-3]) < (warm_up + seconds) * 1e3:
            for _ in range(issues):
                load.issue()
            events.append(self.torch.cuda.Event(enable_timing=True))
            events[-1].record()
            if len(events) > 3:
                events[-3].synchronize()
        self.torch.cuda.synchronize()
        warm = [event for event in events if events[0].elapsed_time(event) >= warm_up * 1e3]
        return [a.elapsed_time(b) * 1e3 / (issues * load.launches) for a, b in itertools.pairwise(warm)]

    def load(self, call: Call) -> Load:
        """Warms a call up, and estimates what it costs the GPU and the host."""
        with call.context():
            for _ in range(3):
                begin = time.perf_counter()
                call.run()
                host_us = (time.perf_counter() - begin) * 1e6
            self.torch.cuda.synchronize()
            return self._estimate(Load(call.run, call.context, 1e9, host_us))

    def _estimate(self, load: Load) -> Load:
        return dataclasses.replace(load, us=float(np.median(self.burst(load, 0.0))))

    def graph(self, call: Call, launches: int = GRAPH_LAUNCHES) -> Load:
        """Captures a call in a graph of so many launches."""
        graph, stream = self.torch.cuda.CUDAGraph(), self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with call.context(), self.torch.cuda.stream(stream):
            call.run()  # what a library allocates for a new stream, it may not allocate in a capture
            stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(launches):
                    call.run()
            finally:
                graph.capture_end()
        graph.replay()
        return self._estimate(Load(graph.replay, contextlib.nullcontext, 1e9, 50.0, launches))

    def host_us(self, run: Callable[[], Any], us: float) -> float:
        """Returns the median microseconds that the host spends in a call, the GPU never far behind."""
        samples = []
        self.torch.cuda.synchronize()
        for _ in range(int(np.clip(12e3 / us, 15, 200))):
            begin = time.perf_counter_ns()
            run()
            samples.append((time.perf_counter_ns() - begin) / 1e3)
        self.torch.cuda.synchronize()
        return float(np.median(samples))

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """Returns the memory that a call takes at most, its output included, as torch's allocator counts it."""
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        run()
        return int(cuda.max_memory_allocated() - before)


class CupyGpu(Clock):
    """The current CUDA device, by CuPy's events, where there is no torch. Launch costs are in the times of short calls."""

    def burst(self, load: Load, seconds: float, rest: float = 0.0) -> list[float]:
        """Returns microseconds of each call, of as many as fill the seconds, at least three, after a rest."""
        from cupyx.profiler import benchmark

        time.sleep(rest)
        calls = int(np.clip(seconds * 1e6 / load.us, 3, MOST_ISSUES))
        return [float(seconds) * 1e6 for seconds in benchmark(load.issue, n_repeat=calls, n_warmup=1).gpu_times[0]]


class Host(Clock):
    """The clock of this machine, for calls that are done when they return."""

    def burst(self, load: Load, seconds: float, rest: float = 0.0) -> list[float]:
        """Returns microseconds of each call, of as many as fill the seconds, at least one."""
        time.sleep(rest)
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while not samples or time.perf_counter() < end:
            begin = time.perf_counter()
            load.issue()
            samples.append((time.perf_counter() - begin) * 1e6)
        return samples
