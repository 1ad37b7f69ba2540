"""Times the first call in a fresh process: imports, CUDA, the first call and the second.

python -m perf.cold --peers ours,cudnn,fa2

``ours`` runs twice: with an empty kernel cache, and with the one that it left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from . import command
from .machine import ROOT

STEPS = ("torch", "cuda", "library", "prepare", "first", "second")


def child(name: str, fa3: str | None) -> dict[str, Any]:
    """Seconds of each step, in this process."""
    clock = [time.perf_counter()]
    import torch

    clock.append(time.perf_counter())
    torch.zeros(1, device="cuda").item()
    clock.append(time.perf_counter())
    from . import peers, sets

    found = {} if name == "ours" else peers.installed(fa3 if name == "fa3" else None)
    clock.append(time.perf_counter())
    task = peers.Task.make(sets.dense(2, 1024, 16, 128, True))
    torch.cuda.synchronize()
    call = peers.prepare(name, task, found)
    clock.append(time.perf_counter())
    for _ in range(2):
        with call.context():
            call.run()
        torch.cuda.synchronize()
        clock.append(time.perf_counter())
    return {step: round(b - a, 6) for step, a, b in zip(STEPS, clock, clock[1:], strict=False)}


def measure(names: Sequence[str], fa3: str | None = None) -> list[dict[str, Any]]:
    """A row for each contender, each timed in processes of its own."""
    found = []
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm") if name == "ours" else ("",):
                words = [sys.executable, "-m", "perf.cold", "--child", name, *(["--fa3", fa3] if fa3 else [])]
                environment = {**os.environ, "RAWATTN_CACHE": cache}
                ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
                last = (ran.stdout.strip().splitlines() or ["{}"])[-1]
                times = json.loads(last) if ran.returncode == 0 else {"failure": ran.stderr.strip()[-200:]}
                found.append({"name": f"{name} {state}".strip(), **times})
    return found


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = [[row["name"], *(f"{row[step]:.4f}" if step in row else "-" for step in STEPS)] for row in found]
    return [["seconds", *STEPS], *cells]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("cold", __doc__)
    parser.add_argument("--peers", default="ours,cudnn,fa2", help="comma-separated")
    parser.add_argument("--fa3", metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(child(options.child, options.fa3)))
        return 0
    from .report import table

    print(table(rows(measure(options.peers.split(","), options.fa3))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
