"""Searches the configurations of our kernels for the fastest on this device, and writes what it finds for the library to use.

python -m perf.tune --set paper --seconds 600       a search for each kind of operation in the set
python -m perf.tune --set paper --dry --budget 30   no GPU: ranks what compiles without spills by the cost model

A configuration serves a kind of operation (``rawattn.kernel.records.Kind``) of any length: all cases of a kind are tuned at once.
The first population is what the cost model and the record think best. A candidate must be legal, compile without spills or
serialized wgmma (in parallel processes, while the GPU times others) and be right before it is timed, in rounds interleaved with
the incumbent. It takes the incumbent's place if, twice, it is 1 % faster and faster than the noise in the geometric mean over the
kind's cases, and on none of them slower by more than 2 %.

Winners go to rawattn/kernel/records/DEVICE.jsonl kind by kind (its __init__.py has the format), what was tried and the
leaderboard to tune.json and tune.md. ``ratio`` is the time of the cost model's own choice over the best one's. A search that is
started again passes over the kinds that have a record of these sources.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from rawattn.command import timing
from rawattn.driver.device import TYPICAL, Device
from rawattn.errors import UnsupportedError
from rawattn.kernel import records
from rawattn.kernel.records import Kind
from rawattn.runtime.select import KERNELS, Tuned, config_set, nearest, select
from rawattn.testing import Case

from .lib import command, machine, report, sets, statistics
from .lib.checking import Check, failure
from .lib.compiling import Pool, faults
from .lib.ours import config_name, launched, ours
from .lib.search import Search, genes
from .lib.statistics import Ratio, mean_ratio
from .lib.task import Task

AHEAD = 1.01  # a winner must be faster by this factor in the mean, and by more than the noise
BEHIND = 0.98  # no case may lose more
HOPELESS = 1.15  # what a first look shows to be slower than the incumbent by this factor is not raced
GENERATION = 6


@dataclasses.dataclass(frozen=True)
class Group:
    """The cases that one configuration of a kernel serves."""

    kernel: Any
    member: Tuned
    cases: list[Case]

    @property
    def kind(self) -> Kind:
        return Kind.of(self.kernel, self.member.shape)


def groups(cases: Sequence[Case], device: Device, kernel: str | None = None) -> list[Group]:
    """The cases by what the library would run them in; those that the kernel does not compute are left away, and those
    that no record is for."""
    found: dict[Kind, Group] = {}
    for case in cases:
        if not sets.is_tuned(case):
            continue
        op = sets.operation(case)
        with contextlib.suppress(UnsupportedError):
            served, config = select(op, device, kernel)[:2]
            members = [m for m in config_set(served, served.tuning_shapes(op), device) if m.config == config]
            member, _ = nearest(served, tuple(members), op, device)
            found.setdefault(Kind.of(served, member.shape), Group(served, member, [])).cases.append(case)
    return list(found.values())


def beats(ratios: Sequence[Ratio]) -> bool:
    """Says whether ratios of the incumbent's time to a candidate's, one for each case, make the candidate the incumbent."""
    mean = mean_ratio(ratios)
    return mean.value >= AHEAD and mean.low > 1 and min(each.value for each in ratios) >= BEHIND


class Tuner:
    """The search for one group of cases: what is tried next, and what became of it. Costs are geometric means of microseconds."""

    def __init__(self, group: Group, device: Device, seed: int = 0, recorded: Any = None) -> None:
        self.group, self.kernel, self.device = group, group.kernel, device
        self.ops = [sets.operation(case) for case in group.cases]
        candidates = sorted(self.kernel.candidates(group.member.shape, device), key=self.cost)
        self.first = self.best = group.member.modelled
        seeds = [self.first, *([recorded] if recorded else []), *candidates[: GENERATION - 2]]
        self.search = Search(seeds, genes(candidates), lambda c: self.kernel.legal(c, self.ops[0], device) is None, seed)
        self.us, self.ratios = math.nan, list[Ratio]()
        self.tried: dict[str, list[float] | str] = {}  # microseconds of each case, or why it is unfit

    @property
    def ratio(self) -> Ratio:
        """Of the first choice's time to the best one's."""
        return mean_ratio(self.ratios) if self.ratios else Ratio()

    def cost(self, config: Any) -> float:
        """Microseconds that the cost model expects."""
        return 1e6 * statistics.geometric_mean(self.kernel.cost(config, op, self.device) for op in self.ops)

    def reject(self, config: Any, why: str) -> None:
        self.search.tell(config, math.inf)
        self.tried[config_name(config)] = why

    def submit(self, pool: Pool, count: int) -> dict[str, Any]:
        """Starts compiling the next generation; its configurations by the keys of their sources."""
        found = {
            source: config
            for config in self.search.ask(count)
            for op in self.ops
            for source in launched(self.kernel, op, config, self.device)
        }
        pool.submit(found)
        return {source.key: config for source, config in found.items()}

    def compiled(self, pool: Pool, generation: dict[str, Any]) -> list[Any]:
        """Those of a generation that compile well for every case."""
        bad = set()
        for key, binary in pool.results():
            if why := "refused by NVRTC" if isinstance(binary, Exception) else faults(binary):
                self.reject(generation[key], why)
                bad.add(generation[key])
        return [config for config in dict.fromkeys(generation.values()) if config not in bad]

    def dry(self, pool: Pool, budget: int) -> None:
        """Without a GPU: the cost model's order among what compiles well."""
        while generation := self.submit(pool, min(2 * GENERATION, budget - len(self.search.costs))):
            for config in self.compiled(pool, generation):
                self.search.tell(config, self.cost(config))
                self.tried[config_name(config)] = [self.cost(config)]
        self.best, self.us = self.search.ranking()[0]
        self.ratios = [Ratio(*[self.cost(self.first) / self.us] * 3)]

    def row(self) -> list[str]:
        """Of the leaderboard."""
        unfit, worst = (
            sum(isinstance(each, str) for each in self.tried.values()),
            min((r.value for r in self.ratios), default=math.nan),
        )
        names = str(self.group.kind), str(len(self.ops)), config_name(self.first), config_name(self.best)
        return [*names, f"{self.us:.1f}", *str(self.ratio).split(" ", 1), f"{worst:.3f}", str(len(self.tried)), str(unfit)]

    def record(self, clocks: dict[str, float], facts: dict[str, Any]) -> dict[str, Any]:
        """Returns a record as rawattn/kernel/records/__init__.py describes it."""
        like = self.group.member.shape
        found: dict[str, Any] = {"kernel": self.kernel.name, "kind": dataclasses.asdict(self.group.kind)}
        found |= {"config": dataclasses.asdict(self.best)}
        found |= {"code_hash": records.code_hash(self.kernel, like, self.best, self.device)}
        found |= {"ratio": round(self.ratio.value, 4), "interval": [round(x, 4) for x in (self.ratio.low, self.ratio.high)]}
        found |= {"worst": round(min(r.value for r in self.ratios), 4), "us": round(self.us, 3)}
        found |= {"cases": [sets.label(case) for case in self.group.cases], "clocks": clocks}
        return found | {name: facts.get(name) for name in ("nvrtc", "commit", "date")}


class Race:
    """Times configurations on the GPU, on each case of a tuner."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner, self.gpu = tuner, timing.Gpu()
        self.tasks = [Task.make(case) for case in tuner.group.cases]
        self.checks, self.loads = [Check(task) for task in self.tasks], dict[Any, list[timing.Load]]()

    def ready(self, config: Any) -> bool:
        """Says whether a configuration computes what it should and is worth a race; rejects one that fails."""
        try:
            self.loads[config] = [self.load(config, task, check) for task, check in zip(self.tasks, self.checks, strict=True)]
        except Exception as error:  # a kernel that fails is a result
            self.tuner.reject(config, failure(error))
            return False
        if self.tuner.best in self.loads:
            times = [[load.us for load in self.loads[each]] for each in (config, self.tuner.best)]
            slower = statistics.geometric_mean(a / b for a, b in zip(*times, strict=True))
            if slower > HOPELESS and config != self.tuner.first:
                self.tuner.search.tell(config, statistics.geometric_mean(times[0]))
                self.tuner.tried[config_name(config)] = times[0]
                del self.loads[config]
                return False
        return True

    def load(self, config: Any, task: Task, check: Check) -> timing.Load:
        call = ours(task, f"ours:{self.tuner.kernel.name}/{config_name(config)}")
        check(call)
        load = self.gpu.load(call)
        return self.gpu.graph(call) if load.us < timing.GRAPH_BELOW_US else load

    def times(self, configs: Sequence[Any], rounds: int, seed: int = 0) -> list[dict[Any, timing.Rounds]]:
        """For each case the times of each configuration."""
        protocol = dataclasses.replace(timing.BURST, rounds=rounds)
        loads = ({config: self.loads[config][i] for config in configs} for i in range(len(self.tasks)))
        return [timing.race(self.gpu, each, protocol, seed) for each in loads]

    def ratios(self, a: Any, b: Any, seed: int) -> list[Ratio]:
        """Time of a over that of b on each case, in a race of their own."""
        return [statistics.ratio(times[a], times[b]) for times in self.times([a, b], timing.BURST.rounds, seed)]


def evolve(tuner: Tuner, race: Race, pool: Pool, seconds: float) -> None:
    """Generations until the time is up or nothing is left to try: while one is timed, the next compiles."""
    begin = time.monotonic()
    fit = [config for config in tuner.compiled(pool, tuner.submit(pool, GENERATION)) if race.ready(config)]
    if tuner.first not in fit and fit:
        tuner.best = fit[0]
    while fit and time.monotonic() - begin < seconds:
        generation = tuner.submit(pool, GENERATION)
        raced = list(dict.fromkeys([tuner.best, *fit]))
        times = race.times(raced, 3)
        us = {config: [timing.median_of_rounds(each[config]) for each in times] for config in raced}
        for config in raced:
            tuner.tried[config_name(config)] = [round(x, 3) for x in us[config]]
            tuner.search.tell(config, statistics.geometric_mean(us[config]))
        ratios = {config: [statistics.ratio(each[tuner.best], each[config]) for each in times] for config in raced}
        fastest = max(raced, key=lambda config: mean_ratio(ratios[config]).value)
        if beats(ratios[fastest]) and beats(race.ratios(tuner.best, fastest, seed=1)):
            tuner.best = fastest
        tuner.us = statistics.geometric_mean(us[tuner.best])
        fit = [config for config in tuner.compiled(pool, generation) if race.ready(config)]
    pool.drop()
    if tuner.first in race.loads and tuner.best in race.loads:
        tuner.ratios = race.ratios(tuner.first, tuner.best, seed=2)


def leaderboard(tuners: Sequence[Tuner]) -> list[list[str]]:
    """The table of all searches; the last line is the geometric mean over all cases, of the cost model's choices."""
    heading = ["kind", "cases", "first choice", "best", "us", "ratio", "interval", "worst", "tried", "unfit"]
    mean = statistics.geometric_mean(ratio.value for tuner in tuners for ratio in tuner.ratios)
    return [heading, *(tuner.row() for tuner in tuners), ["geometric mean", "", "", "", "", f"{mean:.3f}", "", "", "", ""]]


def add(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes a record in the place of one for the same kind."""
    lines = {**records.read(path), Kind(**record["kind"]): record}.values()
    report.write(path, "".join(json.dumps(each) + "\n" for each in lines))


def pending(options: argparse.Namespace, device: Device, known: dict[Kind, dict[str, Any]]) -> Iterator[Group]:
    """The groups that have no record of these sources; all where they are asked for."""
    cases = sets.load(options.set or ("" if options.cases else "paper"), options.cases)
    for group in groups(cases, device, options.kernel):
        record = known.get(group.kind)
        done = record is not None and records.current(record, group.kernel, group.member.shape, device) is not None
        if options.again or options.dry or not done:
            yield group


def recorded(group: Group, known: dict[Kind, dict[str, Any]]) -> Any:
    """The recorded configuration of a kind, also of other sources; None for none that the kernel still has."""
    fields = known.get(group.kind, {}).get("config", {})
    return (
        group.kernel.config_type(**fields)
        if {f.name for f in dataclasses.fields(group.kernel.config_type)} == set(fields)
        else None
    )


def write(folder: pathlib.Path, facts: dict[str, Any], tuners: Sequence[Tuner]) -> None:
    """The leaderboard, and the time of all that was tried."""
    tried = {str(t.group.kind): {"cases": [sets.label(case) for case in t.group.cases], "us": t.tried} for t in tuners}
    report.write(folder / "tune.json", json.dumps({"machine": facts, "tried": tried}, indent=1))
    parts = ["# Leaderboard", report.origin(facts), report.table(leaderboard(tuners), markdown=True)]
    report.write(folder / "tune.md", "\n\n".join(parts) + "\n")


def tune(
    options: argparse.Namespace, device: Device, path: pathlib.Path, folder: pathlib.Path | None, tuners: list[Tuner]
) -> None:
    """Searches each group once, the time shared by the number of cases that are left; without a folder it writes no tables."""
    console, known, facts, begin = Console(stderr=True), records.read(path), machine.facts(), time.monotonic()
    todo = [*pending(options, device, known)]
    with Pool() as pool, machine.Monitor() as monitor:
        for i, group in enumerate(todo):
            started, left = time.monotonic(), sum(len(each.cases) for each in todo[i:])
            tuner = Tuner(group, device, options.seed, recorded(group, known))
            if options.dry:
                tuner.dry(pool, options.budget)
            else:
                evolve(tuner, Race(tuner), pool, (options.seconds - (started - begin)) * len(group.cases) / left)
                if tuner.ratios:
                    add(path, tuner.record(monitor.summary(started), facts))
            tuners.append(tuner)
            if folder is not None:
                write(folder, facts, tuners)
            console.print(f"{i + 1}/{len(todo)} {'  '.join(tuner.row())}", highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tune", __doc__)
    parser.add_argument("--set", default="", help=f"comma-separated: {', '.join(sets.SETS)}; paper if no --cases is given")
    parser.add_argument("--cases", help="JSON file with cases of your own")
    parser.add_argument("--kernel", choices=[k.name for k in KERNELS[:-1]], help="instead of those that the library chooses")
    parser.add_argument("--seconds", type=float, default=600, help="of search, over all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="search kinds that are recorded for these sources too")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile, rank by the cost model; write only to --out")
    parser.add_argument("--budget", type=int, default=30, help="configurations for each kind with --dry")
    parser.add_argument(
        "--records", type=pathlib.Path, help="file for the records; by default rawattn/kernel/records/DEVICE.jsonl"
    )
    options = parser.parse_args(argv)
    device, tuners = TYPICAL["sm_90a"] if options.dry else machine.gpu("tune"), list[Tuner]()
    path, code = options.records or records.FOLDER / f"{device.slug}.jsonl", 0
    try:
        tune(options, device, path, options.out or (None if options.dry else machine.record(device)), tuners)
    except KeyboardInterrupt:
        print("interrupted: what was found is kept", file=sys.stderr)
        code = 130
    print(report.table(leaderboard(tuners)))
    return code


if __name__ == "__main__":
    sys.exit(main())
