"""rawattn.command.timing's clock on a pretended CUDA device whose time is counted, so that every answer is known."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from rawattn.command import timing
from rawattn.command.timing import Call, Load


class Cuda:
    """torch.cuda of a device that works off its queue: ``run(us)`` adds work, a graph replays what was captured."""

    def __init__(self) -> None:
        self.now, self.spun, self.queued, self.captured = 0.0, 0.0, 0, None  # type: Any
        self.spins: list[float] = []
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None: ...
            def record(self) -> None:
                self.at = cuda.now

            def synchronize(self) -> None: ...
            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        class CUDAGraph:
            def capture_begin(self, capture_error_mode: str) -> None:
                cuda.captured = []

            def capture_end(self) -> None:
                self.work, cuda.captured = cuda.captured, None

            def replay(self) -> None:
                for us in self.work:
                    cuda.run(us)

        class Stream:
            def wait_stream(self, other: Any) -> None: ...
            def synchronize(self) -> None: ...
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        self.Event, self.CUDAGraph, self.Stream = Event, CUDAGraph, Stream
        self.stream, self.current_stream, self.synchronize = (lambda stream: stream), (lambda: None), (lambda: None)
        self._sleep = self.spins.append

    def run(self, us: float) -> None:
        if self.captured is not None:
            self.captured.append(us)
        else:
            self.now += us


@pytest.fixture
def gpu() -> timing.Gpu:
    clock = timing.Gpu.__new__(timing.Gpu)
    clock.torch = types.SimpleNamespace(cuda=Cuda())
    return clock


def test_events(gpu: timing.Gpu) -> None:
    load = gpu.load(Call(lambda: gpu.torch.cuda.run(200.0)))
    assert load.us == pytest.approx(200) and load.launches == 1
    samples = gpu.burst(load, 0.012)
    assert len(samples) == 60 and np.allclose(samples, 200)
    assert gpu.torch.cuda.spins[-1] >= timing.SPIN_CYCLES_PER_US * 60 * load.host_us, "the spin covers the launches"
    assert len(gpu.burst(load, 0.0)) == 3
    assert len(gpu.burst(Load(load.issue, load.context, 0.1, 1.0), 1.0)) == timing.MOST_ISSUES


def test_graph_agrees_with_events(gpu: timing.Gpu) -> None:
    load = gpu.graph(Call(lambda: gpu.torch.cuda.run(7.0)))
    assert load.us == pytest.approx(7) and load.launches == timing.GRAPH_LAUNCHES
    assert np.allclose(gpu.burst(load, 0.012), 7)


def test_a_failed_capture_leaves_no_capture_behind(gpu: timing.Gpu) -> None:
    def run() -> None:
        if gpu.torch.cuda.captured is not None:
            raise RuntimeError("not in a capture")

    with pytest.raises(RuntimeError, match="not in a capture"):
        gpu.graph(Call(run))
    assert gpu.torch.cuda.captured is None


def test_sustained_load_passes_over_the_warm_up(gpu: timing.Gpu) -> None:
    """The clock drops after 0.3 s: only the time after it counts."""
    cuda = gpu.torch.cuda
    load = Load(lambda: cuda.run(100.0 if cuda.now < 0.3e6 else 150.0), Call(lambda: None).context, 100.0, 5.0)
    samples = gpu.sustain(load, 1.0, 0.3)
    assert np.allclose(samples[1:], 150) and 60 < len(samples) < 90
    assert 1.29e6 < cuda.now < 1.4e6


def test_protocols(gpu: timing.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    cuda = gpu.torch.cuda
    loads = {name: gpu.load(Call(lambda us=us: cuda.run(us))) for name, us in (("a", 100.0), ("b", 300.0))}
    burst = timing.race(gpu, loads, timing.BURST)
    assert [rest for rest in rests if rest] == [0.020] * 10 and {name: len(found) for name, found in burst.items()} == {
        "a": 5,
        "b": 5,
    }
    assert np.allclose(burst["b"], 300) and len(burst["a"][0]) == 120
    sustained = timing.race(gpu, loads, timing.SUSTAINED)
    assert len(sustained["a"]) == 3 and all(len(found) > 90 for found in sustained["a"])


def test_host_time_is_the_hosts(gpu: timing.Gpu) -> None:
    assert gpu.host_us(lambda: gpu.torch.cuda.run(1e6), 1e6) < 1000
