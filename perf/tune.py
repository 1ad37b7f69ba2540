"""Searches the configurations of our kernels for the fastest on this device, and writes what it finds for the library to use.

python -m perf.tune --set paper --seconds 600       evolves a population for each case, timed against the incumbent
python -m perf.tune --set paper --dry --budget 30   no GPU: ranks what compiles without spills by the cost model

The first population is what the cost model and the record think best. A candidate must be legal, compile without spills or
serialized wgmma (in parallel processes, while the GPU times others) and be right before it is timed, in rounds interleaved with
the incumbent. It takes the incumbent's place if it is 1 % faster and faster than the noise, twice. Winners are written to
rawattn/records/DEVICE.jsonl (the format is in perf/records.py), trials to perf/record/DEVICE/tune-trials.jsonl: a search that is
started again passes over the classes it finished for the same sources, and knows what it tried.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from rawattn import driver
from rawattn.choose import KERNELS
from rawattn.device import TYPICAL, Device
from rawattn.testing import Case

from . import command, machine, records, report, sets, statistics, timing
from .bench import TOLERANCE, Check, failure, verify
from .compiling import Pool, faults, source_of, without_lse
from .peers import Task, config_name, ours
from .records import shape_class
from .search import Search, genes

AHEAD = 1.01  # a winner must be faster by this factor, and by more than the noise
GENERATION = 6


def beats(candidate: statistics.Ratio) -> bool:
    """Whether a ratio of the incumbent's time to a candidate's makes the candidate the incumbent."""
    return candidate.value >= AHEAD and candidate.low > 1


class Trials:
    """What was tried, as lines of a file, so that a later run need not try it again."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._hash = path, machine.source_hash()
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = [trial for trial in map(json.loads, lines) if trial["source_hash"] == self._hash]

    def of(self, label: str) -> dict[str, float]:
        return {trial["config"]: trial["cost"] for trial in self._known if trial["case"] == label}

    def add(self, label: str, config: str, cost: float, why: str = "") -> None:
        trial = {"case": label, "config": config, "cost": cost, "why": why, "source_hash": self._hash}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(trial) + "\n")


@dataclasses.dataclass
class Found:
    """How a search ended."""

    label: str
    first: str  # the cost model's choice
    best: str
    us: float
    ratio: statistics.Ratio
    tried: int
    unfit: int


class Tuner:
    """The search for one case, of one kernel."""

    def __init__(self, case: Case, kernel: Any, device: Device, trials: Trials, seed: int, recorded: Any = None) -> None:
        self.case, self.kernel, self.device, self.trials = case, kernel, device, trials
        self.problem, self.label = without_lse(case.problem), sets.label(case)
        candidates = sorted(kernel.candidates(self.problem, device), key=self.cost)
        seeds = [candidates[0], *([recorded] if recorded is not None else []), *candidates[1:GENERATION]]
        self.first, self.unfit = candidates[0], 0
        self.search = Search(seeds, genes(candidates), lambda c: kernel.legal(c, self.problem, device) is None, seed)
        self.names = {config_name(c): c for c in candidates}

    def cost(self, config: Any) -> float:
        return self.kernel.cost(config, self.problem, self.device)

    def tell(self, config: Any, cost: float, why: str = "") -> None:
        self.search.tell(config, cost)
        self.trials.add(self.label, config_name(config), cost, why)
        self.unfit += cost == math.inf

    def submit(self, pool: Pool, count: int) -> dict[str, Any]:
        """Starts compiling the next generation; its configurations by the key of their source."""
        found = {source_of(self.kernel, self.problem, config): config for config in self.search.ask(count)}
        pool.submit(found)
        return {source.key: config for source, config in found.items()}

    def compiled(self, pool: Pool, generation: dict[str, Any]) -> list[Any]:
        """Those of a generation that are fit to be timed."""
        fit = []
        for key, binary in pool.results():
            why = "refused by NVRTC" if isinstance(binary, Exception) else faults(binary)
            if why:
                self.tell(generation[key], math.inf, why)
            else:
                fit.append(generation[key])
        return sorted(fit, key=self.cost)

    def dry(self, pool: Pool, budget: int) -> Found:
        """Without a GPU: the cost model's order among what compiles well."""
        while len(self.search.costs) < budget:
            generation = self.submit(pool, min(2 * GENERATION, budget - len(self.search.costs)))
            if not generation:
                break
            for config in self.compiled(pool, generation):
                self.tell(config, self.cost(config) * 1e6)
        best, us = self.search.ranking()[0]
        ratio = self.cost(self.first) * 1e6 / us
        return Found(
            self.label, config_name(self.first), config_name(best), us, statistics.Ratio(ratio, ratio, ratio), *self.counts()
        )

    def counts(self) -> tuple[int, int]:
        return len(self.search.costs), self.unfit


class Race:
    """Times configurations of one case on the GPU."""

    def __init__(self, tuner: Tuner, gpu: timing.Clock) -> None:
        self.tuner, self.gpu, self.task = tuner, gpu, Task.make(tuner.case)
        self.check, self.loads = Check(self.task, 0), {}  # type: dict[Any, timing.Load]

    def ready(self, config: Any) -> bool:
        """Whether a configuration computes what it should; what does not is told to the search."""
        if config in self.loads:
            return True
        try:
            call = ours(self.task, f"ours:{self.tuner.kernel.name}/{config_name(config)}")
            error = verify(call, self.check, self.task.q, (*self.task.q.shape[:-1], self.tuner.case.head_dim_v))
            if not error < TOLERANCE[self.tuner.case.dtype]:
                raise ArithmeticError(f"relative error {error:.2g}")
            load = self.gpu.load(call)
            self.loads[config] = self.gpu.graph(call) if load.us < timing.GRAPH_BELOW_US else load
        except Exception as error:  # a kernel that fails is a result
            self.tuner.tell(config, math.inf, failure(error))
        return config in self.loads

    def times(self, configs: Sequence[Any], rounds: int, seed: int = 0) -> dict[Any, timing.Rounds]:
        protocol = dataclasses.replace(timing.BURST, rounds=rounds)
        return timing.race(self.gpu, {config: self.loads[config] for config in configs}, protocol, seed)

    def ratio(self, a: Any, b: Any, rounds: int = 5, seed: int = 0) -> statistics.Ratio:
        times = self.times([a, b], rounds, seed)
        return statistics.ratio(times[a], times[b])


def evolve(tuner: Tuner, race: Race, pool: Pool, seconds: float) -> Found:
    """Generations until the time is up or nothing is left to try: while one is timed, the next compiles."""
    search, incumbent, begin = tuner.search, tuner.first, time.monotonic()
    for name, cost in tuner.trials.of(tuner.label).items():
        if name in tuner.names and tuner.names[name] != incumbent:
            search.tell(tuner.names[name], cost if cost is not None else math.inf)
    generation = tuner.submit(pool, GENERATION)
    fit = [c for c in tuner.compiled(pool, generation) if race.ready(c)]
    if not race.ready(incumbent):
        incumbent = fit[0]
    us = race.loads[incumbent].us
    while fit or generation:
        generation = tuner.submit(pool, GENERATION)
        times = race.times(list(dict.fromkeys([incumbent, *fit])), 3)
        us = statistics.median_of_rounds(times[incumbent])
        ratios = {config: statistics.ratio(times[incumbent], rounds) for config, rounds in times.items()}
        for config, ratio in ratios.items():
            tuner.tell(config, us / ratio.value)
        best = max(ratios, key=lambda config: ratios[config].value)
        if beats(ratios[best]) and beats(race.ratio(incumbent, best, seed=1)):
            incumbent, us = best, us / ratios[best].value
        if time.monotonic() - begin > seconds:
            break
        fit = [config for config in tuner.compiled(pool, generation) if race.ready(config)]
    last = (
        race.ratio(tuner.first, incumbent, seed=2)
        if tuner.first in race.loads
        else statistics.Ratio(math.nan, math.nan, math.nan)
    )
    return Found(tuner.label, config_name(tuner.first), config_name(incumbent), us, last, *tuner.counts())


def record_of(tuner: Tuner, found: Found, config: Any, clocks: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
    return {
        "kernel": tuner.kernel.name, "class": dataclasses.asdict(shape_class(tuner.problem)), "config": dataclasses.asdict(config),
        "us": round(found.us, 3), "ratio": round(found.ratio.value, 4),
        "interval": [round(found.ratio.low, 4), round(found.ratio.high, 4)], "case": sets.to_json(tuner.case), "clocks": clocks,
        **{name: facts.get(name) for name in ("nvrtc", "source_hash", "commit", "date")},
    }  # fmt: skip


def leaderboard(found: Sequence[Found]) -> list[list[str]]:
    """The table of all searches; the last line is the geometric mean over the cost model's first choices."""
    rows = [["case", "first choice", "best", "us", "ratio", "interval", "tried", "unfit"]]
    for f in found:
        interval = f"{f.ratio.low:.3f}..{f.ratio.high:.3f}"
        rows.append([f.label, f.first, f.best, f"{f.us:.1f}", f"{f.ratio.value:.3f}", interval, str(f.tried), str(f.unfit)])
    mean = statistics.geometric_mean(f.ratio.value for f in found if f.ratio.value == f.ratio.value)
    return [*rows, ["geometric mean", "", "", "", f"{mean:.3f}", "", "", ""]]


def arguments() -> argparse.ArgumentParser:
    parser = command.parser("tune", __doc__)
    parser.add_argument("--set", default="", help=f"comma-separated: {', '.join(sets.SETS)}; paper if no --cases is given")
    parser.add_argument("--cases", help="JSON file with cases of your own")
    parser.add_argument("--seconds", type=float, default=600, help="of search, over all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="search classes that are recorded for these sources too")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile, and rank by the cost model; writes no records")
    parser.add_argument("--budget", type=int, default=30, help="configurations for each case with --dry")
    parser.add_argument("--out", type=pathlib.Path, help="folder for leaderboard and trials; by default perf/record/DEVICE")
    parser.add_argument("--records", type=pathlib.Path, help="file for the records; by default rawattn/records/DEVICE.jsonl")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments().parse_args(argv)
    if not options.dry and driver.device_count() == 0:
        print("perf.tune: no NVIDIA GPU here; --dry needs none.", file=sys.stderr)
        return 2
    device = TYPICAL["sm_90a"] if options.dry else driver.device(0)
    folder = options.out or report.RECORD / ("dry" if options.dry else machine.slug(device.name))
    path = options.records or records.FOLDER / f"{machine.slug(device.name)}.jsonl"
    cases = sets.load(options.set or ("" if options.cases else "paper"), options.cases)
    found: list[Found] = []
    try:
        tune(options, device, cases, path, Trials(folder / "tune-trials.jsonl"), found)
    except KeyboardInterrupt:
        print("interrupted: what was found is kept", file=sys.stderr)
    if found:
        report.write(folder / "tune.md", report.table(leaderboard(found), markdown=True) + "\n")
        print(report.table(leaderboard(found)))
    return 0


def tune(
    options: argparse.Namespace, device: Device, cases: Sequence[Case], path: pathlib.Path, trials: Trials, found: list[Found]
) -> None:
    """Searches each class of shapes once, the time shared evenly among those that are left."""
    console, known, facts, begin = Console(stderr=True), records.read(path), machine.facts(), time.monotonic()
    done = {key for key, record in known.items() if record["source_hash"] == facts["source_hash"] and not options.again}
    work = {}
    for case in cases:
        problem = without_lse(case.problem)
        for kernel in (kernel for kernel in KERNELS if kernel.supports(problem, device) is None):
            work.setdefault((kernel.name, shape_class(problem)), (case, kernel))
    todo = [item for key, item in work.items() if options.dry or key not in done]
    with Pool() as pool, machine.Monitor() as monitor:
        for i, (case, kernel) in enumerate(todo):
            recorded = known.get((kernel.name, shape_class(without_lse(case.problem))))
            seed_config = kernel.Config(**recorded["config"]) if recorded else None
            tuner, started = Tuner(case, kernel, device, trials, options.seed, seed_config), time.monotonic()
            if options.dry:
                found.append(tuner.dry(pool, options.budget))
            else:
                share = (options.seconds - (started - begin)) / (len(todo) - i)
                found.append(evolve(tuner, Race(tuner, timing.Gpu()), pool, share))
                best = next(c for c in tuner.search.costs if config_name(c) == found[-1].best)
                records.add(path, record_of(tuner, found[-1], best, monitor.summary(started), facts))
            console.print(f"{i + 1}/{len(todo)} {found[-1].label}: {found[-1].best} {found[-1].ratio}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
