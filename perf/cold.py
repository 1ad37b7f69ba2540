"""Times the first call in a fresh process: imports, CUDA, the first call and the second.

python -m perf.cold --peers ours,cudnn,fa2

``ours`` runs twice: with an empty kernel cache, and with the one that it left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from . import command, machine, report

STEPS = ("torch", "cuda", "library", "prepare", "first", "second")


def child(name: str, fa3: str | None) -> dict[str, float]:
    """Seconds of each step, in this process."""
    clock = [time.perf_counter()]
    import torch

    clock.append(time.perf_counter())
    torch.zeros(1, device="cuda").item()
    clock.append(time.perf_counter())
    from . import peers, sets

    found = {} if name == "ours" else peers.installed(fa3 if name == "fa3" else None)
    clock.append(time.perf_counter())
    call = peers.prepare(name, peers.Task.make(sets.dense(2, 1024, 16, 128, True)), found)
    torch.cuda.synchronize()
    for _ in range(2):
        clock.append(time.perf_counter())
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
                ran = subprocess.run(words, cwd=machine.ROOT, capture_output=True, text=True, env=environment)
                times = {"failure": ran.stderr[-200:]} if ran.returncode else json.loads(ran.stdout.splitlines()[-1])
                found.append({"name": f"{name} {state}".strip(), **times})
    return found


def rows(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    cells = [[row["name"], *(f"{row[step]:.4f}" if step in row else "-" for step in STEPS)] for row in found]
    return [["seconds", *STEPS], *cells]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("cold", __doc__)
    parser.add_argument("--peers", default="ours,cudnn,fa2", help="comma-separated")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    parser.add_argument("--child", help="time this one here and print it as JSON")
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(child(options.child, options.fa3)))
    elif machine.gpu("cold") is None:
        return 2
    else:
        print(report.table(rows(measure(options.peers.split(","), options.fa3))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
