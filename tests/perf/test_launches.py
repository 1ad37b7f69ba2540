"""The times of a call's launches, with a clock that is not a GPU's."""

from __future__ import annotations

import types
from typing import Any

import pytest

from perf import launches
from rawattn.command import timing
from rawattn.driver.launch import BoundLaunch


class Launch(BoundLaunch):
    """One that takes so many milliseconds."""

    def __init__(self, ms: float, clock: list[float]) -> None:
        def issue() -> tuple[int]:
            clock.append(clock[-1] + ms)
            return (0,)

        self._issue: Any = issue


class Event:
    def __init__(self, clock: list[float]) -> None:
        self.clock, self.at = clock, 0.0

    def record(self) -> None:
        self.at = self.clock[-1]

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_each_launch_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BURST", timing.TimingProtocol("burst", 3, 0.0, 0.0))
    clock, before = [0.0], BoundLaunch.__call__
    made = [Launch(ms, clock) for ms in (2, 5, 0.5)]
    cuda = types.SimpleNamespace(Event=lambda enable_timing: Event(clock), synchronize=lambda: None, _sleep=lambda cycles: None)

    def run() -> None:
        for each in made:
            each()

    found = launches.measure(run, types.SimpleNamespace(cuda=cuda))
    assert [launch for launch, _ in found] == made
    assert [us for _, us in found] == pytest.approx([2000, 5000, 500])
    assert BoundLaunch.__call__ is before
