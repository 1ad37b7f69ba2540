"""Reads the GPU's hardware counters on a case through Nsight Compute (ncu) and says how far they are from where they should be.

python -m perf.counters paper/21                      our kernel, in the configuration that the library chooses
python -m perf.counters paper/21 --name fa3 --fa3 fa3.so.xz --kernel flash
python -m perf.counters --report FILE.ncu-rep         a report that was made before

ncu comes with the CUDA toolkit, and alone from https://developer.nvidia.com/nsight-compute. Where it says ERR_NVGPUCTRPERM, the
counters are for administrators: run it as root, or let the driver's option NVreg_RestrictProfilingToAdminUsers be 0. Clocks are
left alone. ncu's own time of a kernel is not a benchmark: caches are flushed before each of its passes.
"""

from __future__ import annotations

import csv
import glob
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from . import command, report

# What is shown: its name, ncu's metric (names differ by version: the first that matches), and least or greatest of the target.
FIGURES = (
    ("SM busy, %", r"sm__instruction_throughput\.avg\.pct_of_peak_sustained_active|sm__throughput\.avg\.pct.*elapsed", 80, None),
    ("tensor pipe active, %", r"sm__(inst_executed_)?pipe_tensor(_op_[gh]mma)?_cycles_active\.avg\.pct.*active", 80, None),
    ("wgmma issued, % of peak", r"sm__inst_executed_pipe_tensor_op_gmma\.avg\.pct.*active", None, None),
    ("issue slots busy, %", r"sm__inst_issued\.avg\.pct.*active|smsp__issue_active\.avg\.pct", None, None),
    ("MUFU (xu) pipe, %", r"sm__inst_executed_pipe_xu\.avg\.pct.*active", None, 80),
    ("FMA pipe, %", r"sm__(inst_executed_)?pipe_fma(_cycles_active)?\.avg\.pct.*active", None, 80),
    ("ALU pipe, %", r"sm__(inst_executed_)?pipe_alu(_cycles_active)?\.avg\.pct.*active", None, 80),
    ("DRAM throughput, %", r"dram__throughput\.avg\.pct|gpu__dram_throughput\.avg\.pct", None, None),
    ("L2 throughput, %", r"lts__throughput\.avg\.pct|lts__t_sectors\.avg\.pct", None, None),
    ("L2 hit rate, %", r"lts__t_sector_hit_rate\.pct", None, None),
    ("shared-memory bank conflicts", r"l1tex__data_bank_conflicts_pipe_lsu\.sum", None, 0),
    ("bytes of local memory (spills)", r"smsp__inst_executed_op_local.*\.sum|.*local_spill.*\.sum", None, 0),
    ("registers at entry", r"launch__registers_per_thread", None, None),
    ("warps resident, % of most", r"sm__warps_active\.avg\.pct.*active", None, None),
    ("microseconds under ncu", r"gpu__time_duration\.sum", None, None),
)
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SAMPLES = "Warp Stall Sampling (All Samples)"


def find_ncu() -> str | None:
    return shutil.which("ncu") or next(
        iter(sorted(glob.glob("/usr/local/cuda*/bin/ncu") + glob.glob("/opt/nvidia/*/*/ncu"))), None
    )


def number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def parse_raw(text: str) -> dict[str, float]:
    """Metrics of the first kernel in ``ncu --page raw --csv``: a line of names, one of units, one for each kernel."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 5]
    return {name: number(value) for name, value in zip(rows[0], rows[2], strict=False)} if len(rows) > 2 else {}


def parse_source(text: str, most: int = 10) -> list[tuple[str, int, str]]:
    """(instruction, samples, greatest stall reason) of the most sampled lines of ``ncu --page source --csv``."""
    rows = list(csv.reader(io.StringIO(text)))
    head = next((i for i, row in enumerate(rows) if SAMPLES in row), None)
    if head is None:
        return []
    names, found = rows[head], []
    stalls = [i for i, name in enumerate(names) if name.startswith("stall_") and not name.endswith("_not_issued")]
    for row in (row for row in rows[head + 1 :] if len(row) == len(names)):
        samples = number(row[names.index(SAMPLES)])
        if samples > 0:
            reason = max(stalls, key=lambda i: number(row[i]) if row[i] else 0, default=None)
            found.append((row[names.index("Source")].strip(), int(samples), names[reason][6:] if reason is not None else ""))
    return sorted(found, key=lambda line: -line[1])[:most]


def verdict(metrics: dict[str, float]) -> list[list[str]]:
    """A line for each figure that was found, and whether it is where it should be; then the three greatest stall reasons."""
    rows = [["figure", "value", "target", ""]]
    for name, pattern, least, most in FIGURES:
        metric = next((each for each in metrics if re.fullmatch(rf"(?:{pattern}).*", each)), None)
        if metric is None:
            continue
        value = metrics[metric]
        good = (least is None or value >= least) and (most is None or value <= most)
        target = f">= {least}" if least is not None else f"<= {most}" if most is not None else ""
        rows.append([name, f"{value:.6g}", target, ("ok" if good else "off") if target else ""])
    stalls = sorted(((metrics[m[0]], m[1]) for m in map(STALL.fullmatch, metrics) if m and m[1] != "selected"), reverse=True)
    return rows + [[f"stalled: {reason}", f"{value:.2f}", "", "warps per issue"] for value, reason in stalls[:3]]


def child(name: str, spec: str, fa3: str | None) -> None:
    """Runs a contender three times; ncu looks at the last."""
    from . import peers, sets

    found = {} if name.startswith("ours") else peers.installed(fa3)
    call = peers.prepare(name, peers.Task.make(sets.pick(spec)), found)
    with call.context():
        for _ in range(3):
            call.run()
    __import__("torch").cuda.synchronize()


def run(ncu: str, words: Sequence[str], kernel: str, out: pathlib.Path) -> None:
    """Writes a report of the third launch of a kernel whose name matches."""
    options = [
        "--set",
        "full",
        "--clock-control",
        "none",
        "--kernel-name",
        f"regex:{kernel}",
        "--launch-skip",
        "2",
        "--launch-count",
        "1",
    ]
    python = [sys.executable, "-m", "perf.counters", "--child", *words]
    ran = subprocess.run([ncu, *options, "-f", "-o", str(out), *python], capture_output=True, text=True)
    if ran.returncode or not out.with_suffix(".ncu-rep").exists():
        raise SystemExit(f"ncu failed ({ran.returncode}):\n{(ran.stdout + ran.stderr)[-3000:]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("counters", __doc__)
    parser.add_argument("case", nargs="?", default="paper/21", help="SET/NUMBER, or a case as JSON")
    parser.add_argument("--name", default="ours", help="ours, ours:128x96s2q2, or a peer")
    parser.add_argument("--kernel", default="attn_", help="part of the kernel's name")
    parser.add_argument("--fa3", metavar="FILE")
    parser.add_argument("--report", type=pathlib.Path, help="read this .ncu-rep instead of running")
    parser.add_argument("--out", type=pathlib.Path, help="keep the report under this name")
    parser.add_argument("--child", action="store_true", help="only run the case, as ncu does it")
    options = parser.parse_args(argv)
    if options.child:
        child(options.name, options.case, options.fa3)
        return 0
    ncu = find_ncu()
    if ncu is None:
        print("perf.counters: ncu is not here. " + " ".join((__doc__ or "").split("\n\n")[-1].split("\n")), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        rep = options.report or (options.out or pathlib.Path(folder, "counters")).with_suffix(".ncu-rep")
        if options.report is None:
            words = [options.case, "--name", options.name, *(["--fa3", options.fa3] if options.fa3 else [])]
            run(ncu, words, options.kernel, rep.with_suffix(""))
        pages = [["raw"], ["source", "--print-source", "sass"]]
        raw, source = (
            subprocess.run(
                [ncu, "--import", str(rep), "--csv", "--print-units", "base", "--page", *page], capture_output=True, text=True
            ).stdout
            for page in pages
        )
    print(report.table(verdict(parse_raw(raw))))
    print(report.table([["instruction", "samples", "stall"], *parse_source(source)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
