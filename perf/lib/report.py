"""This module writes what a timing run found: JSON with everything, Markdown to read."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn.command.timing import median_of_rounds

from . import expected, statistics
from .sets import from_json, mask_label

NONE = (math.nan, math.nan, math.nan)
STATE = ("sm_mhz", "power_w", "celsius")
YARDSTICKS = (
    "built_in",
    "tensors",
    "apart",
    "read",
)  # no peers: ours without the case's function, and what perf/lib/steps.py has


@dataclasses.dataclass
class Timing:
    """One contender on one case; times in microseconds."""

    name: str
    config: str = ""
    us: float = math.nan  # median over rounds of each round's median
    p90: float = math.nan
    tflops: float = math.nan
    gbs: float = math.nan
    error: float = math.nan  # relative, on sampled rows
    other_us: float = math.nan  # by the timer that the case was not raced with
    host_us: float = math.nan  # of one eager call
    plan_us: float = math.nan  # of Plan.run(out=), ours alone
    peak_mb: float = math.nan
    before_us: float = math.nan  # of what a call needs that is made before, such as a block mask
    failure: str = ""  # why it was not timed
    note: str = ""
    medians: list[float] = dataclasses.field(default_factory=list)  # of each round
    rounds: list[list[float]] = dataclasses.field(default_factory=list)  # every sample; not written

    @property
    def is_ours(self) -> bool:
        return self.name.partition(":")[0] == "ours"

    def take(self, rounds: list[list[float]], flops: int, least_bytes: int) -> None:
        """Fills in what follows from the samples of each round."""
        self.rounds, self.medians = rounds, [round(float(np.median(samples)), 3) for samples in rounds]
        self.us, self.p90 = median_of_rounds(rounds), float(np.percentile(np.concatenate(rounds), 90))
        self.tflops, self.gbs = flops / self.us / 1e6, least_bytes / self.us / 1e3


@dataclasses.dataclass
class Result:
    """All contenders on one case. ``ratios[ours][peer]`` is (value, low, high) of the peer's time over ours."""

    label: str
    case: dict[str, Any]
    flops: int
    bytes: int
    timer: str  # "events" or "graph"
    timings: list[Timing] = dataclasses.field(default_factory=list)
    ratios: dict[str, dict[str, tuple[float, float, float]]] = dataclasses.field(default_factory=dict)
    state: dict[str, float] = dataclasses.field(default_factory=dict)

    def compare(self, draws: int = 2000) -> None:
        """Fills ``ratios``, whose intervals take so many draws; ``best`` is the fastest peer."""
        timed = [timing for timing in self.timings if timing.rounds]
        rivals = [timing for timing in timed if not timing.is_ours]
        others = [rival for rival in rivals if rival.name not in YARDSTICKS]
        for mine in (timing for timing in timed if timing.is_ours):
            found = {
                rival.name: dataclasses.astuple(statistics.ratio(rival.rounds, mine.rounds, draws=draws)) for rival in rivals
            }
            if others:
                found["best"] = found[min(others, key=lambda rival: rival.us).name]
            self.ratios[mine.name] = found

    def ratio(self, peer: str = "best", mine: str = "ours") -> float:
        """To a peer, or to one that is expected (``expected.py``); NaN where it has no part in the case."""
        of = self.ratios.get(mine, {})
        return (of if peer in of else expected.ratios(from_json(self.case), of)).get(peer, NONE)[0]

    def row(self) -> dict[str, Any]:
        """The times and failures of all contenders by name, and the ratios to ours, to be written in short."""
        us = {t.name: round(t.us, 2) for t in self.timings if math.isfinite(t.us)}
        of = {name: [round(x, 4) for x in ratio] for name, ratio in self.ratios.get("ours", {}).items()}
        failures = {t.name: t.failure or t.note for t in self.timings if t.failure or (t.note and t.name not in us)}
        return {"label": self.label, "us": us, "ratios": of, "failures": failures}

    def timing(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)


@dataclasses.dataclass
class Run:
    """A whole run, complete or interrupted."""

    machine: dict[str, Any]
    arguments: dict[str, Any]
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    results: list[Result] = dataclasses.field(default_factory=list)
    left_out: list[str] = dataclasses.field(default_factory=list)
    cold: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        """Names of the peers that were timed at least once, in order of appearance."""
        return list(dict.fromkeys(t.name for r in self.results for t in r.timings if not t.is_ours and t.medians))

    @property
    def columns(self) -> list[str]:
        """The peers, and those that are expected somewhere."""
        found = [math.isfinite(result.ratio(expected.FA4)) for result in self.results]
        return self.peers + [expected.FA4] * any(found)

    def write(self, folder: pathlib.Path, stem: str) -> None:
        fields = dataclasses.asdict(self)
        for timing in (timing for result in fields["results"] for timing in result["timings"]):
            del timing["rounds"]
        for suffix, text in (("json", json.dumps(fields, default=str)), ("md", self.markdown())):
            write(folder / f"{stem}.{suffix}", text)

    @classmethod
    def read(cls, path: pathlib.Path) -> Run:
        fields = json.loads(path.read_text())
        results = [Result(**{**result, "timings": [Timing(**t) for t in result["timings"]]}) for result in fields["results"]]
        return cls(**{**fields, "results": results})

    def markdown(self) -> str:
        found = {**self.machine, **{name: f"{value:.0f}" for name, value in self.ceilings.items()}}
        left_out = f"Not timed: {', '.join(self.left_out)}." if self.left_out else ""
        parts = [
            f"# {self.arguments.get('set')}, {self.arguments.get('protocol')}",
            "\n".join(f"- {k}: {v}" for k, v in found.items()),
        ]
        tables = [self.summary(), self.rows(), self.before()]
        parts += [*(table(rows, markdown=True) for rows in tables if rows), left_out]
        return "\n\n".join(filter(None, parts)) + "\n"

    def rows(self) -> list[list[str]]:
        """The table of cases, heading first; several configurations of ours get a line each, the fastest first."""
        peers, matmul = self.columns, self.ceilings.get("matmul_tflops", math.nan)
        first, last = "case config us p90 TFLOP/s matmul best interval", "err host plan other/us MHz"
        rows = [[*first.split(), *peers, *last.split()]]
        for result in self.results:
            mhz = result.state.get("sm_mhz", math.nan)
            for t in sorted((t for t in result.timings if t.is_ours), key=lambda t: (math.isnan(t.us), t.us)):
                best = result.ratios.get(t.name, {}).get("best", NONE)
                rows.append([
                    result.label, t.config, f"{t.us:.1f}", f"{t.p90:.1f}", f"{t.tflops:.0f}", f"{100 * t.tflops / matmul:.0f}%",
                    f"{best[0]:.3f}", f"{best[1]:.3f}..{best[2]:.3f}", *(f"{result.ratio(peer, t.name):.3f}" for peer in peers),
                    f"{t.error:.1e}", f"{t.host_us:.1f}", f"{t.plan_us:.1f}", f"{t.other_us / t.us:.3f}", f"{mhz:.0f}",
                ])  # fmt: skip
        return [[cell.replace("nan", "-") for cell in row] for row in rows]

    def summary(self) -> list[list[str]]:
        """Geometric means and least ratios to the best peer and to each, by head_dim and mask."""
        rows, groups = [["head_dim", "mask", "cases", "best", "min", *self.columns]], dict[tuple[str, str], list[Result]]()
        for result in self.results:
            case = from_json(result.case)
            for key in ((str(case.head_dim), mask_label(case)), (str(case.head_dim), "all"), ("all", "all")):
                groups.setdefault(key, []).append(result)
        for (dim, mask), members in sorted(groups.items(), key=lambda item: (item[0][0].zfill(4), item[0][1])):
            ratios = {peer: [v for r in members if not math.isnan(v := r.ratio(peer))] for peer in ("best", *self.columns)}
            means = [f"{statistics.geometric_mean(values):.3f}" for values in ratios.values()]
            rows.append([dim, mask, str(len(members)), means[0], f"{min(ratios['best'], default=math.nan):.3f}", *means[1:]])
        return rows

    def before(self) -> list[list[str]]:
        """The table of what was made before calls, such as block masks, heading first; empty where nothing was."""
        found = [(result.label, t) for result in self.results for t in result.timings if not math.isnan(t.before_us)]
        rows = [[label, t.name, f"{t.us:.1f}", f"{t.before_us:.1f}", f"{t.us + t.before_us:.1f}"] for label, t in found]
        return [["case", "name", "us", "before", "both"], *rows] if rows else []

    def failures(self) -> list[str]:
        timings = [(result.label, timing) for result in self.results for timing in result.timings]
        return [f"{label}: {t.name}: {t.failure or t.note}" for label, t in timings if t.failure or t.note]


Ratios = dict[str, tuple[float, float, float]]  # peer -> value, low, high
WORSE = 0.98


def moved(recorded: dict[str, Ratios], found: dict[str, Ratios], share: float = 1.0) -> tuple[list[list[str]], list[str]]:
    """The table of what moved, of ratios by case, and the regressions in words; ``share`` is what a machine that is slower today
    has of its matrix product's rate."""
    rows, bad = [["case", "peer", "recorded", "now", "moved", ""]], list[str]()
    for label in dict.fromkeys([*found, *recorded]):
        old, new = recorded.get(label, {}), found.get(label, {})
        for peer in dict.fromkeys([*new, *old]):
            a, b = old.get(peer, NONE), new.get(peer, NONE)
            allowed = 1.0 if peer == "matmul" else share
            worse = b[0] < WORSE * allowed * a[0] and b[2] < allowed * a[1]
            what = "new" if peer not in old else "missing" if peer not in new else "worse" if worse else ""
            by = f"{b[0] / a[0] - 1:+.1%}" if peer in old and peer in new else "-"
            rows.append([label, peer, f"{a[0]:.3f}", f"{b[0]:.3f}", by, what])
            bad += [f"{label} against {peer}: {a[0]:.3f} -> {b[0]:.3f}"] * (what in ("worse", "missing"))
    return rows, bad


def write(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step, so that an interruption leaves the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def origin(facts: dict[str, Any]) -> str:
    """One line that says where and when a table was measured, from ``machine.facts()``."""
    names = ("device", "date", "commit", "source_hash", "nvrtc")
    return ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))


def table(rows: Sequence[Sequence[Any]], markdown: bool = False) -> str:
    """Rows as aligned text, or as a Markdown table; the first row is the heading. Columns of numbers are aligned to the right,
    columns with words, and the first, to the left."""
    texts = [["-" if (cell := str(each)) in ("nan", "nan..nan", "[nan, nan]") else cell for each in row] for row in rows]
    columns = [*zip(*texts, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    left = [i == 0 or any(re.search("[A-Za-z]{2}", cell) for cell in column[1:]) for i, column in enumerate(columns)]
    aligned = [[f"{cell:{'<' if left[i] else '>'}{widths[i]}}" for i, cell in enumerate(row)] for row in texts]
    if not markdown:
        return "\n".join("  ".join(row).rstrip() for row in aligned)
    rule = ["-" * max(1, width - 1) + ":-"[left[i]] for i, width in enumerate(widths)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [aligned[0], rule, *aligned[1:]])
