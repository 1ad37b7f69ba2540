"""Says whether this checkout may pass: the tests, and the speed of some cases against the peers, compared with the record.

python -m perf.gate              tests on the GPU, compile checks, timing; exit status 0 if nothing got worse
python -m perf.gate --update     the same, and what it finds becomes the record

Steps over caches, and shapes beyond those of the papers, have a gate of their own: ``python -m perf.map --gate``.

Fails on a failed test or a wrong result, on more bytes spilled than recorded or a message on wgmma, and on a ratio that is
worse than the recorded one by more than 2 % and by more than the noise of both runs: to cuDNN or FlashAttention 2, in float32
to SDPA's efficient backend, or of a Python function to what is built-in. A case that no other computes is compared by its rate
over the matrix product's of its run. Where that product is slower than recorded, as on a warm GPU, a ratio may fall by as
much: what power bounds loses to what it does not. What was recorded and is missing now is a failure too. Cases: the set "gate"
of ``perf/lib/sets.py``.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from rawattn.compile import compiler
from rawattn.driver.device import Device
from rawattn.testing import Case

from .lib import benchmark, command, machine, report, sets
from .lib.ours import sources
from .lib.peers import Adapter
from .lib.report import Ratios, Run, moved

PEERS = ("cudnn", "fa2", "efficient")  # the last in float32, which the others do not compute


def rivals(case: Case, peers: dict[str, Adapter]) -> list[str]:
    """The names of the contenders beside ours: those that compute the number format."""
    return [
        name for name in benchmark.rivals(case, peers) if (name == "efficient") == (case.dtype == "fp32") or name == "built_in"
    ]


def ratios(run: Run) -> dict[str, Ratios]:
    """Of each case of a run the ratios to the peers that computed it, or, where none did, to the matrix product."""
    found, matmul = dict[str, Ratios](), run.ceilings.get("matmul_tflops", math.nan)
    for result in run.results:
        named = (*PEERS, "built_in")
        found[result.label] = {peer: ratio for peer, ratio in result.ratios.get("ours", {}).items() if peer in named}
        for ours in (t for t in result.timings if t.name == "ours" and t.medians and not found[result.label]):
            rates = [result.flops / us / 1e6 / matmul for us in (ours.us, max(ours.medians), min(ours.medians))]
            found[result.label]["matmul"] = rates[0], rates[1], rates[2]
    return found


def compare(before: Run, now: Run) -> tuple[list[list[str]], list[str]]:
    """The table of what moved, and the regressions in words."""
    was, rate = (run.ceilings.get("matmul_tflops", math.nan) for run in (before, now))
    rows, worse = moved(ratios(before), ratios(now), min(1.0, rate / was) if rate > 0 < was else 1.0)
    known, found = (run.arguments.get("spills", {}) for run in (before, now))
    return rows, worse + [f"{label}: {n} bytes spilled" for label, n in found.items() if n > known.get(label, 0)]


def run_tests() -> list[str]:
    """Runs pytest and returns its last line if a test failed, else nothing."""
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    ran = subprocess.run(words, cwd=machine.ROOT, capture_output=True, text=True)
    print(last := "tests: " + (ran.stdout + ran.stderr).strip().splitlines()[-1])
    return [last] if ran.returncode else []


def spills(cases: Sequence[Case], device: Device) -> tuple[dict[str, int], list[str]]:
    """Of each case the bytes of a thread that its kernels spill, and their messages on wgmma."""
    found, messages = dict[str, int](), list[str]()
    for case in cases:
        built = [compiler.compile(source) for source in sources({case: ["ours"]}, device)]
        found[sets.label(case)] = sum(binary.spill_bytes for binary in built)
        messages += [f"{sets.label(case)}: {message}" for binary in built for message in binary.advisories]
    return {label: count for label, count in found.items() if count}, messages


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("gate", __doc__)
    parser.add_argument("--no-tests", action="store_true", help="leave pytest away")
    parser.add_argument("--update", action="store_true", help="record what is found")
    options = parser.parse_args(argv)
    device = machine.gpu("gate")
    folder, cases = options.out or machine.record(device), sets.SETS["gate"]
    bad = [] if options.no_tests else run_tests()
    run = Run(machine.facts(), {"set": "gate", "protocol": "burst"})
    settings = benchmark.Settings(peers=",".join(PEERS), quick=True)
    benchmark.measure(
        settings, device, [(sets.label(case), case) for case in cases], run, lambda: None, Console(stderr=True), rivals
    )
    bad += [failure for failure in run.failures() if ": ours: " in failure]
    run.arguments["spills"], messages = spills(cases, device)
    bad += messages
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
