"""Takes techniques away one at a time, or puts a classic mistake in, and times each against the full kernel in one run.

python -m perf.ablate paper/21 paper/9

``time`` is the altered kernel's time over the full kernel's, in interleaved rounds of one run: 1.08 is 8 % slower. The table is
ranked by it: the map of what matters. What a configuration, a choice or a launch value expresses is changed there; the rest are
the patches in perf/ablations/, each of which says in its first line what it does. An altered kernel has to be right to be timed;
what spills says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from rawattn.device import Device
from rawattn.problem import Problem
from rawattn.select import select
from rawattn.variant import order, softmax

from . import command, machine, report, sets, statistics, timing
from .checking import Check, failure
from .compiling import PATCHES, Pool, altered, faults, without_lse
from .peers import Task, config_name, plan_of

LEAKS = ("leaky",)  # patches that are for perf.prove


@dataclasses.dataclass(frozen=True)
class Ablation:
    """One change of a kernel and its configuration."""

    name: str
    what: str
    kernel: Callable[[Any], Any] = lambda kernel: kernel
    config: dict[str, int] = dataclasses.field(default_factory=dict)


def one_group(kernel: Any) -> Any:
    return altered(kernel, values=lambda found, p, *_: {**found, "l2_head_group": p.heads * p.batch, "last_group": 0})


def lazy(kernel: Any) -> Any:
    return altered(kernel, choices=lambda found, *_: {**found, "Softmax": softmax.LazyRescale()})


def steady(kernel: Any) -> Any:
    return altered(kernel, choices=lambda found, *_: {**found, "Softmax": softmax.ConstantTime()})


def other_order(kernel: Any) -> Any:
    others = {order.PingPong(): order.Unordered(), order.Unordered(): order.PingPong()}
    return altered(kernel, order_of=lambda found, *_: others[found])


ABLATIONS = [
    Ablation("full", "The kernel as it is."),
    Ablation("two_stages", "Rings of two K and V tiles.", config={"stages": 2}),
    Ablation("one_q_stage", "The next Q is not loaded ahead.", config={"q_stages": 1}),
    Ablation("one_consumer", "One consumer warpgroup of 64 rows.", config={"tile_q": 64}),
    Ablation("tiny_tiles", "Key tiles of 32 rows.", config={"tile_kv": 32}),
    Ablation("one_group", "No groups of heads for L2: all heads in turn.", one_group),
    Ablation("lazy_softmax", "A maximum is looked for in every tile.", lazy),
    Ablation("constant_time", "The softmax rescales at every tile, whatever the data.", steady),
    Ablation("other_order", "Warpgroups issue their products in turns, or, where they do, whenever they like.", other_order),
]
for _path in sorted(PATCHES.glob("*.patch")):
    if _path.stem not in LEAKS:
        _what = _path.read_text().partition("\n")[0]
        ABLATIONS.append(Ablation(_path.stem, _what, lambda kernel, name=_path.stem: altered(kernel, name)))  # type: ignore[misc]


def compile_all(kernel: Any, problem: Problem, configs: dict[str, Any], device: Device) -> None:
    """Fills the cache in parallel processes; what cannot be made says so when its turn comes."""
    with Pool() as pool:
        for each in ABLATIONS:
            with contextlib.suppress(Exception):
                pool.submit([each.kernel(kernel).render(problem, configs[each.name], device.arch)])
        for _ in pool.results():
            pass


def measure(task: Task, device: Device) -> list[list[str]]:
    """The table of all ablations on a case, the costliest first; what was not timed comes last, with the reason."""
    choice, check, gpu = select(without_lse(task.case.problem), device), Check(task), timing.Gpu()
    configs = {each.name: dataclasses.replace(choice.config, **each.config) for each in ABLATIONS}
    loads, notes = dict[str, timing.Load](), dict[str, str]()
    compile_all(choice.kernel, without_lse(task.case.problem), configs, device)
    for each in track(ABLATIONS, "checking", console=Console(stderr=True), transient=True):
        if each.config and configs[each.name] == choice.config:
            notes[each.name] = "is so already"
            continue
        try:
            plan = plan_of(task, each.kernel(choice.kernel), configs[each.name])
            call = timing.Call(lambda plan=plan: plan.run(task.q, task.k, task.v, *task.packed[:2]))  # type: ignore[misc]
            notes[each.name] = faults(plan.binary) if plan.binary else ""
            check(call)
            loads[each.name] = gpu.load(call)
        except Exception as error:  # what a mistake leads to is a result
            notes[each.name] = failure(error)
    times = timing.race(gpu, loads, timing.BURST)
    ratios = {name: statistics.ratio(rounds, times["full"]) for name, rounds in times.items()}
    rows = [["ablation", "time", "interval", "config", "what", "note"]]
    for each in sorted(ABLATIONS, key=lambda each: -ratios.get(each.name, statistics.Ratio(0)).value):
        ratio = ratios.get(each.name, statistics.Ratio())
        numbers = [f"{ratio.value:.3f}", f"{ratio.low:.3f}..{ratio.high:.3f}", config_name(configs[each.name])]
        rows.append([each.name, *numbers, each.what, notes[each.name]])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("ablate", __doc__)
    parser.add_argument("cases", nargs="*", default=["paper/21"], help="SET/NUMBER, or a case as JSON; default: paper/21")
    options = parser.parse_args(argv)
    device, facts, found = machine.gpu("ablate"), machine.facts(), dict[str, list[list[str]]]()
    folder = options.out or machine.record(device)
    try:
        for case in map(sets.pick, options.cases):
            found[sets.label(case)] = rows = measure(Task.make(case), device)
            parts = [f"## {label}\n\n{report.table(each, markdown=True)}\n" for label, each in found.items()]
            report.write(folder / "ablate.md", "\n".join(["# Ablations\n", f"{report.origin(facts)}\n", *parts]))
            report.write(folder / "ablate.json", json.dumps({"machine": facts, "tables": found}, indent=1))
            print(f"{sets.label(case)}\n{report.table(rows)}\n", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(found)} cases are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
