"""Draws what perf.bench wrote: bars for each head_dim and mask, and a roofline. No GPU is needed.

python -m perf.plot perf/record/h200/bench-paper-burst.json [--out FOLDER] [--peers fa3,cudnn,fa2]
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from . import command
from .report import Result, Run
from .sets import from_json, mask_label

COLORS = {"ours": "#c0392b", "fa3": "#2c3e50", "cudnn": "#76b900", "fa2": "#7f8c8d", "fa4": "#2980b9", "triton": "#8e44ad"}


def bars(run: Run, names: Sequence[str]) -> Any:
    """TFLOP/s over length, a panel for each head_dim and mask, the matmul's rate as a line."""
    from matplotlib.figure import Figure

    panels: dict[tuple[int, str], list[Result]] = {}
    for result in run.results:
        case = from_json(result.case)
        panels.setdefault((case.head_dim, mask_label(case)), []).append(result)
    rows, columns = sorted({dim for dim, _ in panels}), list(dict.fromkeys(mask for _, mask in panels))
    figure = Figure(figsize=(1 + 5.5 * len(columns), 0.6 + 2.8 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    for (dim, mask), results in panels.items():
        axis = axes[rows.index(dim)][columns.index(mask)]
        for i, name in enumerate(names):
            heights = [next((t.tflops for t in result.timings if t.name == name), math.nan) for result in results]
            places = [x + (i - (len(names) - 1) / 2) * 0.8 / len(names) for x in range(len(results))]
            axis.bar(places, heights, 0.8 / len(names), label=name, color=COLORS.get(name))
        axis.set_xticks(range(len(results)), [tick(result) for result in results], fontsize=8)
        axis.set_title(f"head_dim {dim}, {mask}", fontsize=10)
        axis.set_ylabel("TFLOP/s")
        if "matmul_tflops" in run.ceilings:
            axis.axhline(run.ceilings["matmul_tflops"], color="black", linewidth=0.8, linestyle="--", label="8192³ matmul")
    axes[0][0].legend(fontsize=8, loc="upper left")
    figure.suptitle(title(run), fontsize=10)
    return figure


def tick(result: Result) -> str:
    case = from_json(result.case)
    return f"{len(case.lengths)} seqs" if case.lengths is not None else f"{case.batch}x{case.q_len}"


def roofline(run: Run, names: Sequence[str]) -> Any:
    """Rate over operations per byte, below the machine's ceilings in the same run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for name in reversed(names):
        points = [
            (r.flops / r.bytes, t.tflops) for r in run.results for t in r.timings if t.name == name and t.tflops == t.tflops
        ]
        if points:
            axis.plot(*zip(*points, strict=True), "o", markersize=4, label=name, color=COLORS.get(name))
    peak, bandwidth = run.ceilings.get("matmul_tflops", math.nan), run.ceilings.get("copy_gbs", math.nan) / 1e3
    intensities = [result.flops / result.bytes for result in run.results] or [1.0]
    xs = [min(*intensities, peak / bandwidth) / 2, peak / bandwidth, max(*intensities, peak / bandwidth) * 2]
    axis.plot(xs, [min(peak, bandwidth * x) for x in xs], color="black", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte that must be moved", ylabel="TFLOP/s")
    axis.legend(fontsize=8)
    axis.set_title(title(run), fontsize=10)
    return figure


def title(run: Run) -> str:
    machine, arguments = run.machine, run.arguments
    return (
        f"{machine.get('device')}, {arguments.get('protocol')}, {machine.get('date', '')[:10]}, {machine.get('commit', '')[:8]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("plot", __doc__)
    parser.add_argument("json", type=pathlib.Path, help="written by perf.bench")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the pictures; by default that of the file")
    parser.add_argument("--peers", default="fa3,cudnn,fa2", help="comma-separated")
    options = parser.parse_args(argv)
    run = Run.read(options.json)
    if not run.results:
        print(f"perf.plot: {options.json} has no timings", file=sys.stderr)
        return 1
    names = ["ours", *(name for name in options.peers.split(",") if name in run.peers)]
    folder = options.out or options.json.parent
    folder.mkdir(parents=True, exist_ok=True)
    for kind, draw in (("bars", bars), ("roofline", roofline)):
        path = folder / f"{options.json.stem}-{kind}.svg"
        draw(run, names).savefig(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
