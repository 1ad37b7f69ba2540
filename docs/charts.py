"""Draws the pages' own pictures as SVG: the speed beside others, and the tiles of a mask.

python docs/charts.py        writes docs/speed.svg, which README.md and the home page show
"""

from __future__ import annotations

import math
import pathlib
import sys
from typing import Any
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from perf.lib.report import Run  # noqa: E402
from perf.lib.sets import from_json  # noqa: E402

RECORDS = ROOT / "perf" / "record" / "h200"
PANELS = {"forward": "bench-paper-burst", "gradients": "bench-paper-bwd-burst"}
BARS = {"ours": ("rawattn", "#c0392b"), "fa3": ("FlashAttention 3", "#2c3e50"), "cudnn": ("cuDNN", "#76b900")}
WIDTH, PANEL, TOP = 480, 196, 56  # units of the drawing; a phone shows it at three quarters of that
FONT = "font-family='system-ui, sans-serif'"


def rates(run: Run) -> dict[int, dict[str, float]]:
    """The geometric mean of TFLOP/s over the shapes of each head_dim, by contender."""
    found: dict[int, dict[str, list[float]]] = {}
    for result in run.results:
        for timing in result.timings:
            if timing.name in BARS and timing.medians:
                found.setdefault(from_json(result.case).head_dim, {}).setdefault(timing.name, []).append(timing.tflops)
    means = {dim: {name: math.exp(math.fsum(map(math.log, x)) / len(x)) for name, x in by.items()} for dim, by in found.items()}
    return dict(sorted(means.items()))


def speed() -> str:
    """Forward and gradients beside FlashAttention 3 and cuDNN, of the recorded runs: a panel each, a group of bars a head_dim."""
    lines, at = [], 12.0
    for name, color in BARS.values():
        lines += [f"<rect x='{at}' y='12' width='14' height='14' fill='{color}'/>", text(at + 20, 24, name, 15, "start")]
        at += 34 + 8.4 * len(name)
    for number, (title, stem) in enumerate(PANELS.items()):
        run = Run.read(RECORDS / f"{stem}.json")
        found, base = rates(run), TOP + (number + 1) * PANEL - 44
        scale = (PANEL - 92) / max(rate for by in found.values() for rate in by.values())
        lines.append(text(12, base - PANEL + 60, f"{title}, TFLOP/s", 15, "start", "bold"))
        for group, (dim, by) in enumerate(found.items()):
            left = 12 + group * 156
            for i, (name, (_, color)) in enumerate(BARS.items()):
                x, height = left + i * 48, by[name] * scale
                lines.append(f"<rect x='{x}' y='{base - height:.1f}' width='44' height='{height:.1f}' fill='{color}'/>")
                lines.append(text(x + 22, base - height - 5, f"{by[name]:.0f}", 14, "middle", "bold" if i == 0 else "normal"))
            lines.append(text(left + 70, base + 20, f"head_dim {dim}", 15, "middle"))
        lines.append(f"<line x1='8' x2='{WIDTH - 8}' y1='{base}' y2='{base}' stroke='#111'/>")
    height = TOP + 2 * PANEL + 12
    run = f"{run.machine['device']}, bf16, geometric means over 12 shapes each, in bursts"
    lines.append(text(12, height - 8, run, 13, "start"))
    return svg(WIDTH, height, "Speed of rawattn, FlashAttention 3 and cuDNN on an H200", lines)


def text(x: float, y: float, words: str, size: int, anchor: str, weight: str = "normal") -> str:
    style = f"font-size='{size}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text x='{x:.0f}' y='{y:.0f}' {style}>{escape(words)}</text>"


def svg(width: int, height: int, title: str, lines: list[str]) -> str:
    size = f"width='{width}' height='{height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' {size} {FONT}>"
    ground = f"<title>{escape(title)}</title><rect {size} fill='white'/>"
    return "\n".join([head, ground, *lines, "</svg>", ""])


def tiles(classes: Any, title: str) -> str:
    """The classes of a mask's tiles, (query tiles, key tiles), of which 0 is empty, 1 cut and 2 full: equal neighbours are one
    box."""
    rows, columns = classes.shape
    lines = []
    for row in range(rows):
        begin = 0
        for end in range(1, columns + 1):
            if end == columns or classes[row, end] != classes[row, begin]:
                if classes[row, begin]:
                    kind = ("", "cut", "full")[classes[row, begin]]
                    lines.append(f"<path class='{kind}' d='M{begin} {row}h{end - begin}v1h{begin - end}z'/>")
                begin = end
    head = f"<svg class='tiles' viewBox='0 0 {columns} {rows}' role='img' aria-label='{escape(title)}'>"
    return "".join([head, *lines, "</svg>"])


if __name__ == "__main__":
    (ROOT / "docs" / "speed.svg").write_text(speed(), encoding="utf-8")
