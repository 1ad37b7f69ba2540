"""What a timing run found, and how it is written: JSON with everything, CSV with a line per contender, Markdown to read."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from . import statistics
from .sets import from_json, mask_label


@dataclasses.dataclass
class Timing:
    """One contender on one case; times in microseconds."""

    name: str
    config: str = ""
    us: float = math.nan  # median over rounds of each round's median
    p90: float = math.nan
    spread: float = math.nan  # of the rounds' medians, relative
    tflops: float = math.nan
    gbs: float = math.nan
    error: float = math.nan  # relative, on sampled rows
    other_us: float = math.nan  # by the timer that the case was not raced with
    host_us: float = math.nan  # of one eager call
    plan_us: float = math.nan  # of Plan.run(out=), ours alone
    peak_mb: float = math.nan
    medians: list[float] = dataclasses.field(default_factory=list)  # of each round
    failure: str = ""  # why it was not timed
    note: str = ""
    rounds: list[list[float]] = dataclasses.field(default_factory=list, repr=False)  # every sample; not written

    @property
    def is_ours(self) -> bool:
        return self.name.partition(":")[0] == "ours"

    def take(self, rounds: list[list[float]], flops: int, least_bytes: int) -> None:
        """Fills in what follows from the samples of each round."""
        self.rounds, self.medians = rounds, [round(statistics.percentile(samples, 50), 3) for samples in rounds]
        self.us = statistics.median_of_rounds(rounds)
        self.p90 = statistics.percentile((us for samples in rounds for us in samples), 90)
        self.spread = (max(self.medians) - min(self.medians)) / self.us
        self.tflops, self.gbs = flops / self.us / 1e6, least_bytes / self.us / 1e3


@dataclasses.dataclass
class Result:
    """All contenders on one case. ``ratios[ours][peer]`` is (value, low, high) of the peer's time over ours."""

    label: str
    case: dict[str, Any]
    flops: int
    bytes: int
    timer: str  # "events" or "graph"
    timings: list[Timing]
    ratios: dict[str, dict[str, tuple[float, float, float]]] = dataclasses.field(default_factory=dict)
    state: dict[str, float] = dataclasses.field(default_factory=dict)

    def compare(self) -> None:
        """Fills ``ratios``; ``best`` is the fastest peer."""
        timed = [timing for timing in self.timings if timing.rounds]
        rivals = [timing for timing in timed if not timing.is_ours]
        for mine in (timing for timing in timed if timing.is_ours):
            found = {rival.name: dataclasses.astuple(statistics.ratio(rival.rounds, mine.rounds)) for rival in rivals}
            if rivals:
                found["best"] = found[min(rivals, key=lambda rival: rival.us).name]
            self.ratios[mine.name] = found

    def ratio(self, peer: str = "best", mine: str = "ours") -> float:
        return self.ratios.get(mine, {}).get(peer, (math.nan,) * 3)[0]

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

    def write(self, folder: pathlib.Path, stem: str) -> None:
        fields = dataclasses.asdict(self)
        for result in fields["results"]:
            for timing in result["timings"]:
                del timing["rounds"]
        write(folder / f"{stem}.json", json.dumps(fields, default=str))
        write(folder / f"{stem}.csv", self.csv())
        write(folder / f"{stem}.md", self.markdown())

    @classmethod
    def read(cls, path: pathlib.Path) -> Run:
        fields = json.loads(path.read_text())
        results = [Result(**{**result, "timings": [Timing(**t) for t in result["timings"]]}) for result in fields["results"]]
        return cls(**{**fields, "results": results})

    def csv(self) -> str:
        out = io.StringIO()
        names = [f.name for f in dataclasses.fields(Timing) if f.name not in ("rounds", "medians")]
        peers, state = ("best", *self.peers), ("sm_mhz", "power_w", "celsius")
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["case", *names, "flops", "bytes", "timer", *(f"ratio_{peer}" for peer in peers), *state])
        for result in self.results:
            for timing in result.timings:
                values = [getattr(timing, name) for name in names] + [result.flops, result.bytes, result.timer]
                values += [result.ratio(peer, timing.name) for peer in peers]
                values += [result.state.get(name, math.nan) for name in state]
                writer.writerow([result.label, *map(_cell, values)])
        return out.getvalue()

    def markdown(self) -> str:
        head = f"# {self.arguments.get('set', '')} {self.arguments.get('protocol', '')}\n\n"
        machine = "\n".join(f"- {name}: {value}" for name, value in self.machine.items())
        ceilings = "\n".join(f"- {name}: {value:.0f}" for name, value in self.ceilings.items())
        summary, cases = (table(rows, markdown=True) for rows in (self.summary(), self.rows()))
        parts = [head + machine, ceilings, "## Summary", summary, "## Cases", cases]
        if self.left_out:
            parts.append("Not timed: " + ", ".join(self.left_out))
        return "\n\n".join(filter(None, parts)) + "\n"

    def rows(self) -> list[list[str]]:
        """The table of cases, heading first; several configurations of ours get a line each, the fastest first."""
        peers, matmul = self.peers, self.ceilings.get("matmul_tflops", math.nan)
        first, last = (
            ("case", "config", "us", "p90", "TFLOP/s", "matmul", "best", "interval"),
            ("err", "host", "plan", "other/us", "MHz"),
        )
        rows = [[*first, *peers, *last]]
        for result in self.results:
            mine = sorted((t for t in result.timings if t.is_ours), key=lambda t: (t.us != t.us, t.us))
            for timing in mine or [Timing("ours", failure="not run")]:
                best = result.ratios.get(timing.name, {}).get("best", (math.nan,) * 3)
                mhz = result.state.get("sm_mhz", math.nan)
                rows.append([
                    result.label, timing.config, f"{timing.us:.1f}", f"{timing.p90:.1f}", f"{timing.tflops:.0f}",
                    f"{timing.tflops / matmul:.0%}", f"{best[0]:.3f}", f"{best[1]:.3f}..{best[2]:.3f}",
                    *(f"{result.ratio(peer, timing.name):.3f}" for peer in peers), f"{timing.error:.1e}", f"{timing.host_us:.1f}",
                    f"{timing.plan_us:.1f}", f"{timing.other_us / timing.us:.3f}", f"{mhz:.0f}",
                ])  # fmt: skip
        return [[cell.replace("nan%", "-").replace("nan", "-") for cell in row] for row in rows]

    def summary(self) -> list[list[str]]:
        """Geometric means and least ratios to the best peer and to each, by head_dim and mask."""
        rows = [["head_dim", "mask", "cases", "best", "min", *self.peers]]
        groups: dict[tuple[str, str], list[Result]] = {}
        for result in self.results:
            case = from_json(result.case)
            for key in ((str(case.head_dim), mask_label(case)), (str(case.head_dim), "all"), ("all", "all")):
                groups.setdefault(key, []).append(result)
        for (dim, mask), members in sorted(groups.items(), key=lambda item: (item[0][0].zfill(4), item[0][1])):
            ratios = {peer: [v for r in members if not math.isnan(v := r.ratio(peer))] for peer in ("best", *self.peers)}
            means = [f"{statistics.geometric_mean(values):.3f}" for values in ratios.values()]
            rows.append([dim, mask, str(len(members)), means[0], f"{min(ratios['best'], default=math.nan):.3f}", *means[1:]])
        return rows

    def failures(self) -> list[str]:
        timings = [(result.label, timing) for result in self.results for timing in result.timings]
        return [
            f"{label}: {timing.name}: {timing.failure or timing.note}"
            for label, timing in timings
            if timing.failure or timing.note
        ]


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return value


def write(path: pathlib.Path, text: str) -> None:
    """Replaces a file in one step, so that an interruption leaves the old or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def table(rows: Sequence[Sequence[Any]], markdown: bool = False) -> str:
    """Rows as aligned text, or as a Markdown table; the first row is the heading."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [[f"{cell:{'>' if i else '<'}{widths[i]}}" for i, cell in enumerate(row)] for row in cells]
    if not markdown:
        return "\n".join("  ".join(row).rstrip() for row in aligned)
    rule = ["-" * (w - 1) + (":" if i else "-") if w > 1 else "-" for i, w in enumerate(widths)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [aligned[0], rule, *aligned[1:]])


def lines(items: Iterable[str], most: int = 20) -> str:
    """The first items, one a line, and how many more there are."""
    found = list(items)
    return "\n".join([*found[:most], *([f"... and {len(found) - most} more"] if len(found) > most else [])])
