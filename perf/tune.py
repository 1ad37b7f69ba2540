"""Searches the configurations of our kernels for the fastest on this device, and writes what it finds for the library to use.

python -m perf.tune --set paper --seconds 600       evolves a population for each case, timed against the incumbent
python -m perf.tune --set paper --dry --budget 30   no GPU: ranks what compiles without spills by the cost model

The first population is what the cost model and the record think best. A candidate must be legal, compile without spills or
serialized wgmma (in parallel processes, while the GPU times others) and be right before it is timed, in rounds interleaved with
the incumbent. It takes the incumbent's place if it is 1 % faster and faster than the noise, twice.

Winners go to rawattn/records/DEVICE.jsonl as they are found (perf/records.py has the format), what was tried and the leaderboard
to tune.json and tune.md. A search that is started again passes over the classes that have a record for the same sources.
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

from rawattn.choose import KERNELS, portfolio
from rawattn.device import TYPICAL, Device
from rawattn.testing import Case

from . import command, machine, records, report, sets, statistics, timing
from .checking import Check, failure
from .compiling import Pool, faults, without_lse
from .peers import Task, config_name, ours
from .records import shape_class
from .search import Search, genes

AHEAD = 1.01  # a winner must be faster by this factor, and by more than the noise
GENERATION = 6


def beats(ratio: statistics.Ratio) -> bool:
    """Whether a ratio of the incumbent's time to a candidate's makes the candidate the incumbent."""
    return ratio.value >= AHEAD and ratio.low > 1


class Tuner:
    """The search for one case and kernel: what is tried next, and what became of it."""

    def __init__(self, case: Case, kernel: Any, device: Device, seed: int = 0, recorded: Any = None) -> None:
        self.case, self.kernel, self.device, self.problem = case, kernel, device, without_lse(case.problem)
        candidates = sorted(kernel.candidates(self.problem, device), key=self.cost)
        self.first = self.best = min(portfolio(kernel, kernel.typical(self.problem), device), key=self.cost)
        seeds = [self.first, *([recorded] if recorded else []), *candidates[: GENERATION - 2]]
        self.search = Search(seeds, genes(candidates), lambda c: kernel.legal(c, self.problem, device) is None, seed)
        self.us, self.ratio, self.unfit = math.nan, statistics.Ratio(), dict[str, str]()

    def cost(self, config: Any) -> float:
        """Microseconds that the cost model expects."""
        return float(self.kernel.cost(config, self.problem, self.device)) * 1e6

    def reject(self, config: Any, why: str) -> None:
        self.search.tell(config, math.inf)
        self.unfit[config_name(config)] = why

    def submit(self, pool: Pool, count: int) -> dict[str, Any]:
        """Starts compiling the next generation; its configurations by the key of their source."""
        found = {self.kernel.render(self.problem, config, self.device.arch): config for config in self.search.ask(count)}
        pool.submit(found)
        return {source.key: config for source, config in found.items()}

    def compiled(self, pool: Pool, generation: dict[str, Any]) -> list[Any]:
        """Those of a generation that compile well."""
        fit = []
        for key, binary in pool.results():
            if why := "refused by NVRTC" if isinstance(binary, Exception) else faults(binary):
                self.reject(generation[key], why)
            else:
                fit.append(generation[key])
        return fit

    def dry(self, pool: Pool, budget: int) -> None:
        """Without a GPU: the cost model's order among what compiles well."""
        while generation := self.submit(pool, min(2 * GENERATION, budget - len(self.search.costs))):
            for config in self.compiled(pool, generation):
                self.search.tell(config, self.cost(config))
        self.best, self.us = self.search.ranking()[0]
        self.ratio = statistics.Ratio(*[self.cost(self.first) / self.us] * 3)

    def row(self) -> list[str]:
        """Of the leaderboard."""
        names = sets.label(self.case), config_name(self.first), config_name(self.best)
        return [*names, f"{self.us:.1f}", *str(self.ratio).split(" ", 1), str(len(self.search.costs)), str(len(self.unfit))]

    def record(self, clocks: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
        """What perf/records.py describes."""
        found: dict[str, Any] = {"kernel": self.kernel.name, "class": dataclasses.asdict(shape_class(self.problem))}
        found |= {"config": dataclasses.asdict(self.best), "us": round(self.us, 3), "ratio": round(self.ratio.value, 4)}
        found |= {"interval": [self.ratio.low, self.ratio.high], "case": sets.to_json(self.case), "clocks": clocks}
        return found | {name: facts.get(name) for name in ("nvrtc", "source_hash", "commit", "date")}


class Race:
    """Times configurations of one case on the GPU."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner, self.gpu, self.task = tuner, timing.Gpu(), Task.make(tuner.case)
        self.check, self.loads = Check(self.task), dict[Any, timing.Load]()

    def ready(self, config: Any) -> bool:
        """Whether a configuration computes what it should; one that does not is rejected."""
        try:
            call = ours(self.task, f"ours:{self.tuner.kernel.name}/{config_name(config)}")
            self.check(call)
            load = self.gpu.load(call)
            self.loads[config] = self.gpu.graph(call) if load.us < timing.GRAPH_BELOW_US else load
        except Exception as error:  # a kernel that fails is a result
            self.tuner.reject(config, failure(error))
        return config in self.loads

    def times(self, configs: Sequence[Any], rounds: int, seed: int = 0) -> dict[Any, timing.Rounds]:
        protocol = dataclasses.replace(timing.BURST, rounds=rounds)
        return timing.race(self.gpu, {config: self.loads[config] for config in configs}, protocol, seed)

    def ratio(self, a: Any, b: Any, seed: int) -> statistics.Ratio:
        """Time of a over that of b, in a race of its own."""
        times = self.times([a, b], timing.BURST.rounds, seed)
        return statistics.ratio(times[a], times[b])


def evolve(tuner: Tuner, race: Race, pool: Pool, seconds: float) -> None:
    """Generations until the time is up or nothing is left to try: while one is timed, the next compiles."""
    begin = time.monotonic()
    fit = [config for config in tuner.compiled(pool, tuner.submit(pool, GENERATION)) if race.ready(config)]
    if tuner.first not in fit and fit:
        tuner.best = fit[0]
    while fit and time.monotonic() - begin < seconds:
        generation = tuner.submit(pool, GENERATION)
        times = race.times(list(dict.fromkeys([tuner.best, *fit])), 3)
        tuner.us = statistics.median_of_rounds(times[tuner.best])
        ratios = {config: statistics.ratio(times[tuner.best], rounds) for config, rounds in times.items()}
        for config, ratio in ratios.items():
            tuner.search.tell(config, tuner.us / ratio.value)
        fastest = max(ratios, key=lambda config: ratios[config].value)
        if beats(ratios[fastest]) and beats(race.ratio(tuner.best, fastest, seed=1)):
            tuner.best, tuner.us = fastest, tuner.us / ratios[fastest].value
        fit = [config for config in tuner.compiled(pool, generation) if race.ready(config)]
    pool.drop()
    if tuner.first in race.loads:
        tuner.ratio = race.ratio(tuner.first, tuner.best, seed=2)


def leaderboard(tuners: Sequence[Tuner]) -> list[list[str]]:
    """The table of all searches; the last line is the geometric mean over the cost model's first choices."""
    heading = ["case", "first choice", "best", "us", "ratio", "interval", "tried", "unfit"]
    mean = statistics.geometric_mean(t.ratio.value for t in tuners if not math.isnan(t.ratio.value))
    return [heading, *(tuner.row() for tuner in tuners), ["geometric mean", "", "", "", f"{mean:.3f}", "", "", ""]]


def tune(options: argparse.Namespace, device: Device, path: pathlib.Path, folder: pathlib.Path, tuners: list[Tuner]) -> None:
    """Searches each class of shapes once, the time shared evenly among those that are left."""
    console, known, facts, begin = Console(stderr=True), records.read(path), machine.facts(), time.monotonic()
    cases = sets.load(options.set or ("" if options.cases else "paper"), options.cases)
    done = {key for key, each in known.items() if each["source_hash"] == facts["source_hash"] and not options.again | options.dry}
    todo: dict[Any, tuple[Case, Any]] = {}
    for case in cases:
        for kernel in (kernel for kernel in KERNELS if kernel.supports(without_lse(case.problem), device) is None):
            todo.setdefault((kernel.name, shape_class(without_lse(case.problem))), (case, kernel))
    todo = {key: item for key, item in todo.items() if key not in done}
    with Pool() as pool, machine.Monitor() as monitor:
        for i, (key, (case, kernel)) in enumerate(todo.items()):
            recorded, started = kernel.Config(**known[key]["config"]) if key in known else None, time.monotonic()
            tuner = Tuner(case, kernel, device, options.seed, recorded)
            if options.dry:
                tuner.dry(pool, options.budget)
            else:
                evolve(tuner, Race(tuner), pool, (options.seconds - (started - begin)) / (len(todo) - i))
                if not math.isnan(tuner.us):
                    records.add(path, tuner.record(monitor.summary(started), facts))
            tuners.append(tuner)
            tried = {sets.label(t.case): {config_name(c): us for c, us in t.search.ranking()} | t.unfit for t in tuners}
            report.write(folder / "tune.json", json.dumps(tried, indent=1))
            report.write(folder / "tune.md", report.table(leaderboard(tuners), markdown=True) + "\n")
            console.print(f"{i + 1}/{len(todo)} {'  '.join(tuner.row())}", highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tune", __doc__)
    parser.add_argument("--set", default="", help=f"comma-separated: {', '.join(sets.SETS)}; paper if no --cases is given")
    parser.add_argument("--cases", help="JSON file with cases of your own")
    parser.add_argument("--seconds", type=float, default=600, help="of search, over all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="search classes that are recorded for these sources too")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile, and rank by the cost model; writes no records")
    parser.add_argument("--budget", type=int, default=30, help="configurations for each case with --dry")
    parser.add_argument("--records", type=pathlib.Path, help="file for the records; by default rawattn/records/DEVICE.jsonl")
    options = parser.parse_args(argv)
    device, tuners = TYPICAL["sm_90a"] if options.dry else machine.gpu("tune"), list[Tuner]()
    path = options.records or records.FOLDER / f"{machine.slug(device.name)}.jsonl"
    try:
        tune(options, device, path, options.out or machine.record(device), tuners)
    except KeyboardInterrupt:
        print("interrupted: what was found is kept", file=sys.stderr)
    print(report.table(leaderboard(tuners)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
