"""Draws what perf.bench wrote: bars for each head_dim and mask, and a roofline. No GPU is needed.

python -m perf.plot perf/record/h200/bench-paper-burst.json [--out FOLDER] [--peers fa3,cudnn,fa2]
"""

from __future__ import annotations

import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from .lib import command
from .lib.report import Result, Run
from .lib.sets import from_json, mask_label

LABELS = {"ours": "rawattn", "fa3": "FlashAttention 3", "cudnn": "cuDNN", "fa2": "FlashAttention 2"}
COLORS = {"ours": "#c0392b", "fa3": "#2c3e50", "cudnn": "#76b900", "fa2": "#7f8c8d", "fa4": "#2980b9"}


def bars(run: Run, names: Sequence[str]) -> Any:
    """TFLOP/s over length, a panel for each head_dim and mask, the matmul's rate as a line."""
    from matplotlib.figure import Figure

    panels: dict[tuple[int, str], list[Result]] = {}
    for result in run.results:
        case = from_json(result.case)
        panels.setdefault((case.head_dim, mask_label(case)), []).append(result)
    rows, columns = sorted({dim for dim, _ in panels}), list(dict.fromkeys(mask for _, mask in panels))
    figure = Figure(figsize=(5.2 * len(columns), 0.4 + 3 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    for (dim, mask), results in panels.items():
        axis, width = axes[rows.index(dim)][columns.index(mask)], 0.8 / len(names)
        for i, name in enumerate(names):
            heights = [next((t.tflops for t in result.timings if t.name == name), math.nan) for result in results]
            places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(results))]
            axis.bar(places, heights, width, label=LABELS.get(name, name), color=COLORS.get(name))
        axis.set_xticks(range(len(results)), [result.label.partition(" h")[0] for result in results])
        axis.axhline(run.ceilings.get("matmul_tflops", math.nan), color="black", linewidth=0.8, linestyle="--", label="matmul")
        axis.set(title=f"head_dim {dim}, {mask}", ylabel="TFLOP/s")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def roofline(run: Run, names: Sequence[str]) -> Any:
    """Rate over operations per byte, below the machine's ceilings in the same run."""
    from matplotlib.figure import Figure

    axis = (figure := Figure(figsize=(5.2, 4), layout="constrained")).subplots()
    for name in reversed(names):
        points = [(r.flops / r.bytes, t.tflops) for r in run.results for t in r.timings if t.name == name and t.medians]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axis.plot(xs, ys, "o", markersize=4, label=LABELS.get(name, name), color=COLORS.get(name))
    peak, terabytes = run.ceilings.get("matmul_tflops", math.nan), run.ceilings.get("copy_gbs", math.nan) / 1e3
    xs = sorted([peak / terabytes / 4, peak / terabytes, 2 * max(result.flops / result.bytes for result in run.results)])
    axis.plot(xs, [min(peak, terabytes * x) for x in xs], color="black", linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte that must be moved", ylabel="TFLOP/s")
    axis.legend(fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("plot", __doc__, "that of the file")
    parser.add_argument("json", type=pathlib.Path, help="written by perf.bench")
    parser.add_argument("--peers", default="fa3,cudnn,fa2", help="comma-separated")
    options = parser.parse_args(argv)
    run, folder = Run.read(options.json), options.out or options.json.parent
    if not run.results:
        raise SystemExit(f"perf.plot: {options.json} has no timings")
    names = ["ours", *(name for name in options.peers.split(",") if name in run.peers)]
    folder.mkdir(parents=True, exist_ok=True)
    date, commit = (str(run.machine.get(name, "")) for name in ("date", "commit"))
    for draw in (bars, roofline):
        path, figure = folder / f"{options.json.stem}-{draw.__name__}.svg", draw(run, names)
        figure.suptitle(f"{run.machine.get('device')}, {run.arguments.get('protocol')}, {date[:10]}, {commit[:8]}", fontsize=10)
        figure.savefig(path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
