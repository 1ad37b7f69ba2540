"""Reads the GPU's hardware counters on a case through Nsight Compute (ncu) and says how far they are from where they should be.

python -m perf.counters paper/21                      our kernel, in the configuration that the library chooses
python -m perf.counters paper/21 --name fa3 --fa3 fa3.so.xz --kernel flash

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

from . import command, machine, peers, report, sets, timing

# What is shown: its name, ncu's metric (names differ by version: the first that matches), and least and greatest of the target.
FIGURES = (
    ("SM busy, %", r"sm__instruction_throughput\.avg\.pct.*active|sm__throughput\.avg\.pct.*", 80, None),
    ("tensor pipe active, %", r"sm__(inst_executed_)?pipe_tensor(_op_[gh]mma)?_cycles_active\.avg\.pct.*", 80, None),
    ("issue slots busy, %", r"sm__inst_issued\.avg\.pct.*|smsp__issue_active\.avg\.pct.*", None, None),
    ("MUFU (xu) pipe, %", r"sm__inst_executed_pipe_xu\.avg\.pct.*", None, 80),
    ("FMA pipe, %", r"sm__(inst_executed_)?pipe_fma(_cycles_active)?\.avg\.pct.*", None, 80),
    ("DRAM throughput, %", r"(gpu__)?dram__?throughput\.avg\.pct.*", None, None),
    ("L2 throughput, %", r"lts__(throughput|t_sectors)\.avg\.pct.*", None, None),
    ("L2 hit rate, %", r"lts__t_sector_hit_rate\.pct", None, None),
    ("shared-memory bank conflicts", r"l1tex__data_bank_conflicts_pipe_lsu\.sum", None, 0),
    ("local memory (spills)", r"smsp__inst_executed_op_local.*\.sum|.*local_spill.*\.sum", None, 0),
    ("registers at entry", r"launch__registers_per_thread", None, None),
    ("warps resident, % of most", r"sm__warps_active\.avg\.pct.*", None, None),
)
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SAMPLES = "Warp Stall Sampling (All Samples)"


def number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def parse_raw(text: str) -> dict[str, float]:
    """Metrics of the first kernel in ``ncu --page raw --csv``: a line of names, one of units, one for each kernel."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 5]
    return {name: number(value) for name, value in zip(rows[0], rows[2], strict=False)} if len(rows) > 2 else {}


def parse_source(text: str, most: int = 10) -> list[tuple[str, int, str]]:
    """(instruction, samples, greatest stall reason) of the most sampled lines of ``ncu --page source --csv``."""
    rows = list(csv.reader(io.StringIO(text)))
    names = next((row for row in rows if SAMPLES in row), [])
    lines = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names) and row != names]
    found = []
    for line in (line for line in lines if number(line[SAMPLES]) > 0):
        stalls = [(number(x), name[6:]) for name, x in line.items() if re.fullmatch(r"stall_.*(?<!_not_issued)", name)]
        found.append((line["Source"].strip(), int(number(line[SAMPLES])), max(stalls, default=(0, ""))[1]))
    return sorted(found, key=lambda each: -each[1])[:most]


def verdict(metrics: dict[str, float]) -> list[list[str]]:
    """A line for each figure that was found, and whether it is where it should be; then the three greatest stall reasons."""
    rows = [["figure", "value", "target", ""]]
    for name, pattern, least, most in FIGURES:
        for value in [metrics[metric] for metric in metrics if re.fullmatch(pattern, metric)][:1]:
            target = f">= {least}" if least is not None else f"<= {most}" if most is not None else ""
            good = (least is None or value >= least) and (most is None or value <= most)
            rows.append([name, f"{value:.6g}", target, "" if not target else "ok" if good else "off"])
    stalls = sorted(((metrics[m[0]], m[1]) for m in map(STALL.fullmatch, metrics) if m and m[1] != "selected"), reverse=True)
    return rows + [[f"stalled: {reason}", f"{value:.2f}", "", "warps per issue"] for value, reason in stalls[:3]]


def run_three_times(name: str, spec: str, fa3: str | None) -> None:
    """A contender on a case, under ncu, which looks at the third run."""
    call = peers.prepare(name, peers.Task.make(sets.pick(spec)), {} if name.startswith("ours") else peers.installed(fa3))
    with call.context():
        for _ in range(3):
            call.run()
    timing.Gpu().torch.cuda.synchronize()


def pages(ncu: str, words: Sequence[str | None], kernel: str) -> list[str]:
    """ncu's pages "raw" and "source" of the third launch of a kernel. Raises SystemExit where ncu fails."""
    options = f"--set full --clock-control none --kernel-name regex:{kernel} --launch-skip 2 --launch-count 1".split()
    python = [sys.executable, "-c", f"from perf import counters; counters.run_three_times(*{words})"]
    with tempfile.TemporaryDirectory() as folder:
        rep = pathlib.Path(folder, "counters.ncu-rep")
        made = [ncu, *options, "-o", str(rep.with_suffix("")), *python]
        ran = subprocess.run(made, cwd=machine.ROOT, capture_output=True, text=True)
        if not rep.exists():
            raise SystemExit(f"ncu failed ({ran.returncode}):\n{(ran.stdout + ran.stderr)[-3000:]}")
        read = [ncu, "--import", str(rep), "--csv", "--print-units", "base", "--page"]
        each = (["raw"], ["source", "--print-source", "sass"])
        return [subprocess.run([*read, *page], capture_output=True, text=True).stdout for page in each]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("counters", __doc__)
    parser.add_argument("case", nargs="?", default="paper/21", help="SET/NUMBER, or a case as JSON")
    parser.add_argument("--name", default="ours", help="ours, ours:128x96s2q2, or a peer")
    parser.add_argument("--kernel", default="attn_", help="part of the kernel's name")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    options = parser.parse_args(argv)
    ncu = shutil.which("ncu") or next(iter(glob.glob("/usr/local/cuda*/bin/ncu") + glob.glob("/opt/nvidia/*/*/ncu")), None)
    if ncu is None:
        raise SystemExit("perf.counters: ncu is not here. " + (__doc__ or "").split("\n\n")[-1])
    raw, source = pages(ncu, [options.name, options.case, options.fa3], options.kernel)
    instructions = [["instruction", "samples", "stall"], *parse_source(source)]
    text = f"{report.table(verdict(parse_raw(raw)))}\n\n{report.table(instructions)}"
    folder = options.out or machine.record(machine.gpu("counters"))
    report.write(folder / f"counters-{options.case.replace('/', '-')}-{options.name}.txt", text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
