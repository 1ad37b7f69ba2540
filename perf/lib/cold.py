"""Times the first call in fresh processes; ours with an empty kernel cache, then with the one that this left behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from . import machine

STEPS = ("torch", "cuda", "library", "prepare", "first", "second")


def child(name: str, fa3: str | None) -> dict[str, float]:
    """Seconds of each step, in this process."""
    clock = [time.perf_counter()]
    import torch

    clock.append(time.perf_counter())
    torch.zeros(1, device="cuda").item()
    clock.append(time.perf_counter())
    from . import peers, sets, task

    found = {} if name == "ours" else peers.installed(fa3 if name.startswith("fa3") else None)
    clock.append(time.perf_counter())
    call = peers.prepare(name, task.Task.make(sets.dense(2, 1024, 16, 128, True)), found)
    for _ in range(3):
        torch.cuda.synchronize()
        clock.append(time.perf_counter())
        with call.context():
            call.run()
    return {step: round(b - a, 6) for step, (a, b) in zip(STEPS, itertools.pairwise(clock), strict=True)}


def measure(names: Sequence[str], fa3: str | None = None) -> list[dict[str, Any]]:
    """A row for each contender, each timed in processes of its own."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            for state in (" cold", " warm") if name == "ours" else ("",):
                code = f"import json; from perf.lib import cold; print(json.dumps(cold.child({name!r}, {fa3!r})))"
                words, environment = [sys.executable, "-c", code], {**os.environ, "RAWATTN_CACHE": cache}
                ran = subprocess.run(words, cwd=machine.ROOT, capture_output=True, text=True, env=environment)
                times = {"failure": ran.stderr[-200:]} if ran.returncode else json.loads(ran.stdout.splitlines()[-1])
                found.append({"name": name + state, **times})
    return found


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = [[row["name"], *(f"{row[step]:.4f}" if step in row else "-" for step in STEPS)] for row in found]
    return [["seconds", *STEPS], *cells]
