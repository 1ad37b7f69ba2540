"""Says whether this checkout may pass: the tests, and the speed of some cases against the peers, compared with the record.

python -m perf.gate              tests on the GPU, compile checks, timing; exit status 0 if nothing got worse
python -m perf.gate --update     the same, and what it finds becomes the record

Fails on a failed test or a wrong result, on a spill or a message on wgmma, and on a ratio to cuDNN or FlashAttention 2 that is
worse than the recorded one by more than 2 % and by more than the noise of both runs.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from rawattn import compiler

from . import bench, command, machine, report, sets
from .compiling import faults
from .report import NONE, Run

PEERS = ("cudnn", "fa2")
WORSE = 0.98


def compare(before: Run, now: Run) -> tuple[list[list[str]], list[str]]:
    """The table of what moved, and the regressions in words."""
    recorded = {result.label: result.ratios.get("ours", {}) for result in before.results}
    rows, bad = [["case", "peer", "recorded", "now", "moved", ""]], list[str]()
    for result in now.results:
        for peer in PEERS:
            old, new = recorded.get(result.label, {}).get(peer, NONE), result.ratios.get("ours", {}).get(peer, NONE)
            worse = new[0] < WORSE * old[0] and new[2] < old[1]
            moved = f"{new[0] / old[0] - 1:+.1%}"
            rows.append([result.label, peer, f"{old[0]:.3f}", f"{new[0]:.3f}", moved, "worse" * worse])
            bad += [f"{result.label} against {peer}: {old[0]:.3f} -> {new[0]:.3f}"] * worse
    return rows, bad


def run_tests() -> list[str]:
    """What pytest says where it is not content."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    ran = subprocess.run(words, cwd=machine.ROOT, capture_output=True, text=True)
    print(last := "tests: " + (ran.stdout + ran.stderr).strip().splitlines()[-1])
    return [last] if ran.returncode else []


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("gate", __doc__)
    parser.add_argument("--no-tests", action="store_true", help="leave pytest away")
    parser.add_argument("--update", action="store_true", help="record what is found")
    options = parser.parse_args(argv)
    device = machine.gpu("gate")
    folder, cases = options.out or machine.record(device), sets.SETS["gate"]
    bad = [] if options.no_tests else run_tests()
    run = Run(machine.facts(), {"set": "gate", "protocol": "burst"})
    words = bench.arguments().parse_args(["--peers", ",".join(PEERS), "--quick"])
    bench.measure(words, device, cases, run, lambda: None, Console(stderr=True))
    bad += [failure for failure in run.failures() if ": ours: " in failure]
    built = [compiler.compile(source) for source in bench.sources({case: ["ours"] for case in cases}, device)]
    bad += [f"{binary.key[:12]}: {faults(binary)}" for binary in built if faults(binary)]
    recorded = folder / "gate.json"
    if recorded.exists():
        rows, worse = compare(Run.read(recorded), run)
        bad += worse
        print(report.table(rows))
    if options.update or not recorded.exists():
        run.write(folder, "gate")
        print(f"recorded in {recorded}")
    print("\n".join(bad) if bad else "nothing got worse")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
