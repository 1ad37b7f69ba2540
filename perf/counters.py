"""Reads the GPU's hardware counters on a case through Nsight Compute (ncu) and says how far they are from where they should be.

python -m perf.counters paper/21                      our kernel, in the configuration that the library chooses
python -m perf.counters paper/21 --name fa3 --fa3 fa3.so.xz --kernel flash
python -m perf.counters masks-bwd/0                   of gradients, the kernel that has their products; or --kernel attn_bwd_delta

The verdict says what is far from its target, where the kernel stands under the roofline, and what warps wait for: the reasons by
how many warps stall for them when one issues, and the source lines on which the samples of the three most sampled ones fall.
Bank conflicts are those of threads' own loads and stores; what the TMA and the tensor cores do with shared memory is not
counted there. Spills are the compiler's.

ncu comes with the CUDA toolkit, and alone from https://developer.nvidia.com/nsight-compute. Where it says ERR_NVGPUCTRPERM, the
counters are for administrators: run it as root, or let the driver's option NVreg_RestrictProfilingToAdminUsers be 0. Clocks are
left alone. ncu's own time of a kernel is not a benchmark: caches are flushed before each of its passes.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import glob
import io
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from rawattn.command import timing
from rawattn.compile import compiler
from rawattn.compile.compiler import Source
from rawattn.testing import Case

from .lib import backward, command, machine, peers, report, sets
from .lib.ours import sources
from .lib.task import Task

CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"  # is in no set of ncu's
WAVEFRONTS = r"l1tex__data_pipe_lsu_wavefronts_mem_shared\.sum"
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
    ("shared-memory bank conflicts", re.escape(CONFLICTS), None, 0),
    ("registers at entry", r"launch__registers_per_thread", None, None),
    ("warps resident, % of most", r"sm__warps_active\.avg\.pct.*", None, None),
)
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
SAMPLES = "Warp Stall Sampling (All Samples)"
TENSOR_FLOPS = 4096  # that a multiprocessor multiplies in a clock, 16-bit with float32 sums
WRAPPERS = ("ptx/", "config.cuh", "tile/tile.cuh", "tile/ring.cuh")  # where a line says nothing of who waits
REASONS, LINES, MOST_INSTRUCTIONS = 3, 3, 10  # what is shown


def number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def parse_raw(text: str) -> dict[str, float]:
    """Metrics of the first kernel in ``ncu --page raw --csv``: a line of names, one of units, one for each kernel."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 5]
    return {name: number(value) for name, value in zip(rows[0], rows[2], strict=False)} if len(rows) > 2 else {}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of ``ncu --page source --csv``: bytes from the first instruction, samples in all and by stall reason."""

    offset: int
    text: str
    samples: int
    stalls: dict[str, int]

    @property
    def reason(self) -> str:
        return max(self.stalls, key=self.stalls.__getitem__, default="")


def parse_source(text: str) -> list[Instruction]:
    """The sampled instructions, the most sampled first."""
    rows = list(csv.reader(io.StringIO(text)))
    names = next((row for row in rows if SAMPLES in row), [])
    lines = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names) and row != names]
    begin, found = int(lines[0]["Address"], 0) if lines else 0, []
    for line in (line for line in lines if number(line[SAMPLES]) > 0):
        stalls = {name[6:]: int(number(x)) for name, x in line.items() if re.fullmatch(r"stall_\w+", name)}
        samples, offset = int(number(line[SAMPLES])), int(line["Address"], 0) - begin
        found.append(Instruction(offset, line["Source"].strip(), samples, {name: x for name, x in stalls.items() if x}))
    return sorted(found, key=lambda each: -each.samples)


def source_lines(listing: str, source: Source) -> dict[int, str]:
    """``file:line`` by the offset of an instruction, from ``nvdisasm -c -gi``: of the calls that were inlined the innermost
    that is no wrapper. An instruction without a line, as ptxas leaves most products, has that of the one before it."""
    files, found, here, frames = {source.name, *dict(source.headers)}, dict[int, str](), "", list[str]()
    for line in listing.splitlines():
        if marked := re.search(r'//## File "([^"]+)", line (\d+)', line):
            path = next((name for name in files if f"/{marked[1]}".endswith(f"/{name}")), marked[1])
            frames.append(f"{path}:{marked[2]}")
        elif at := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s", line):
            if frames:
                here = next((frame for frame in frames if not frame.startswith(WRAPPERS)), frames[0])
            found[int(at[1], 16)], frames = here, []
    return found


def stalled_lines(instructions: Sequence[Instruction], places: dict[int, str], source: Source) -> list[list[str]]:
    """For each of the most sampled stall reasons the lines that have most of its samples, with what stands there."""
    every, by_reason = sum(each.samples for each in instructions), dict[str, collections.Counter[str]]()
    for each in instructions:
        for reason, samples in each.stalls.items():
            if reason != "selected":
                by_reason.setdefault(reason, collections.Counter())[places.get(each.offset, "")] += samples
    texts, rows = {source.name: source.text, **dict(source.headers)}, [["stall", "of all", "line", "of this", "source"]]
    for reason in sorted(by_reason, key=lambda reason: -by_reason[reason].total())[:REASONS]:
        total = by_reason[reason].total()
        for place, samples in by_reason[reason].most_common(LINES):
            path, _, line = place.partition(":")
            text = texts[path].splitlines()[int(line) - 1].strip() if path in texts else ""
            rows.append([reason, f"{total / every:.0%}", place, f"{samples / total:.0%}", text[:90]])
    return rows


def first(metrics: dict[str, float], pattern: str) -> float:
    """The first metric whose name matches; NaN for none."""
    return next((value for name, value in metrics.items() if re.fullmatch(pattern, name)), math.nan)


def roofline(metrics: dict[str, float], flops: int, units: int) -> list[list[str]]:
    """Returns lines that say where the kernel stands: its operations per byte that memory moved against the ridge, where memory
    and tensor cores bound alike, and its share of the roof above it. Returns none if ncu has not counted them."""
    moved = sum(first(metrics, rf"dram__bytes_{way}\.sum") for way in ("read", "write"))
    multiplied = 100 * flops / units / TENSOR_FLOPS / first(metrics, r"(sm|gpc)__cycles_elapsed\.max")
    copied = first(metrics, r"(gpu__)?dram__?throughput\.avg\.pct.*")
    if not all(value > 0 for value in (moved, multiplied, copied)):
        return []
    ridge = flops / moved * copied / multiplied
    bound = "tensor cores" if flops / moved > ridge else "memory"
    return [
        ["roofline: FLOP a byte", f"{flops / moved:.0f}", f"ridge {ridge:.0f}", f"bound by {bound}"],
        ["roofline: share of the roof, %", f"{max(multiplied, copied):.1f}", "", ""],
    ]


def verdict(metrics: dict[str, float], spills: int | None = None) -> list[list[str]]:
    """A line for each figure that was found, and whether it is where it should be; then the three greatest stall reasons."""
    rows = [["figure", "value", "target", ""]]
    if spills is not None:
        rows.append(["bytes spilled", str(spills), "<= 0", "off" if spills else "ok"])
    for name, pattern, least, most in FIGURES:
        for value in [metrics[metric] for metric in metrics if re.fullmatch(pattern, metric)][:1]:
            target = f">= {least}" if least is not None else f"<= {most}" if most is not None else ""
            good = (least is None or value >= least) and (most is None or value <= most)
            rows.append([name, f"{value:.6g}", target, "" if not target else "ok" if good else "off"])
    share = 100 * metrics.get(CONFLICTS, math.nan) / (first(metrics, WAVEFRONTS) or math.nan)
    if math.isfinite(share):
        rows.append(["conflicts, % of shared wavefronts", f"{share:.2f}", "", ""])
    stalls = sorted(((metrics[m[0]], m[1]) for m in map(STALL.fullmatch, metrics) if m and m[1] != "selected"), reverse=True)
    return rows + [[f"stalled: {reason}", f"{value:.2f}", "", "warps per issue"] for value, reason in stalls[:REASONS]]


def run_three_times(name: str, spec: str, fa3: str | None) -> None:
    """A contender on a case, under ncu, which looks at the third run."""
    task, installed = Task.make(sets.pick(spec)), {} if name.startswith("ours") else peers.installed(fa3)
    call = backward.prepare(name, task) if sets.is_backward(task.case) else peers.prepare(name, task, installed)
    with call.context():
        for _ in range(3):
            call.run()
    timing.Gpu().torch.cuda.synchronize()


def kernel_of(case: Case) -> str:
    """The name of the kernel that is looked at where none is given: of gradients the one with their products."""
    return "^attn_bwd(_mma|_simt|_dkdv|_dkdv_simt)?$" if sets.is_backward(case) else "attn_"


def pages(ncu: str, words: Sequence[str | None], kernel: str) -> list[str]:
    """ncu's pages "raw" and "source" of the third launch of a kernel. Raises SystemExit where ncu fails."""
    options = f"--set full --metrics {CONFLICTS} --clock-control none".split()
    options += f"--kernel-name regex:{kernel} --launch-skip 2 --launch-count 1".split()
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
    parser.add_argument("--kernel", help="part of the kernel's name, or a regular expression")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    options = parser.parse_args(argv)
    ncu = shutil.which("ncu") or next(iter(glob.glob("/usr/local/cuda*/bin/ncu") + glob.glob("/opt/nvidia/*/*/ncu")), None)
    if ncu is None:
        raise SystemExit("perf.counters: ncu is not here. " + (__doc__ or "").split("\n\n")[-1])
    device, case, spills, places = machine.gpu("counters"), sets.pick(options.case), None, dict[int, str]()
    source, kernel = Source("", "", (), device.arch), options.kernel or kernel_of(case)
    given = sources({case: [options.name]} if options.name.startswith("ours") else {}, device)
    for source in (each for each in given if re.search(kernel, pathlib.PurePath(each.name).stem)):
        binary = compiler.compile(source)
        spills = binary.spill_bytes
        with contextlib.suppress(FileNotFoundError):  # no nvdisasm: no lines
            places = source_lines(compiler.disassemble(binary.cubin, "-c", "-gi"), source)
    raw, sampled = pages(ncu, [options.name, options.case, options.fa3], kernel)
    metrics, instructions = parse_raw(raw), parse_source(sampled)
    table = [["instruction", "line", "samples", "stall"]]
    table += [[x.text, places.get(x.offset, ""), str(x.samples), x.reason] for x in instructions[:MOST_INSTRUCTIONS]]
    rows = verdict(metrics, spills) + roofline(metrics, sets.flops(case), device.sm_count)
    tables = {"verdict": rows, "stalls": stalled_lines(instructions, places, source), "instructions": table}
    folder, facts = options.out or machine.record(device), machine.facts()
    stem = f"counters-{re.sub(r'[^A-Za-z0-9]+', '-', f'{options.case}-{options.name}')}"
    report.write(folder / f"{stem}.json", json.dumps({"machine": facts, "case": sets.to_json(case), **tables}, indent=1))
    parts = [
        f"# {options.name} on {sets.label(case)}",
        report.origin(facts),
        *(report.table(x, markdown=True) for x in tables.values()),
    ]
    report.write(folder / f"{stem}.md", "\n\n".join(parts) + "\n")
    print("\n\n".join(report.table(x) for x in tables.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
