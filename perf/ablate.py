"""Takes techniques away one at a time, or puts a classic mistake in, and times each against the full kernel in one run.

python -m perf.ablate paper/21 paper/9

What a configuration, a choice or a launch value expresses is changed there; the rest are the patches in perf/ablations/, each of
which says in its first line what it does. The table is ranked by what the kernel loses: the map of what matters.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rawattn.choose import choose
from rawattn.device import Device
from rawattn.variant import order, softmax

from . import command, machine, report, sets, statistics, timing
from .checking import Check, failure
from .compiling import PATCHES, altered, faults, without_lse
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
    return altered(kernel, values=lambda found, p, *_: {**found, "head_group": p.heads * p.batch, "last_group": 0})


def lazy(kernel: Any) -> Any:
    return altered(kernel, choices=lambda found, *_: {**found, "Softmax": softmax.Lazy()})


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
    Ablation("other_order", "Warpgroups issue their products in turns, or, where they do, whenever they like.", other_order),
]
for _path in sorted(PATCHES.glob("*.patch")):
    if _path.stem not in LEAKS:
        _what = _path.read_text().partition("\n")[0]
        ABLATIONS.append(Ablation(_path.stem, _what, lambda kernel, name=_path.stem: altered(kernel, name)))  # type: ignore[misc]


def measure(task: Task, device: Device) -> list[list[str]]:
    """The table of all ablations on a case."""
    choice, check, gpu = choose(without_lse(task.case.problem), device), Check(task), timing.Gpu()
    configs = {each.name: dataclasses.replace(choice.config, **each.config) for each in ABLATIONS}
    loads, notes = dict[str, timing.Load](), dict[str, str]()
    for each in ABLATIONS:
        if each.config and configs[each.name] == choice.config:
            notes[each.name] = "is so already"
            continue
        try:
            plan = plan_of(task, each.kernel(choice.kernel), configs[each.name])
            call = timing.Call(lambda plan=plan: plan.run(task.q, task.k, task.v, *task.packed[:2]))  # type: ignore[misc]
            notes[each.name] = faults(plan.binary) if plan.binary else ""
            loads[each.name] = gpu.load(call)
            check(call)
        except Exception as error:  # what a mistake leads to is a result
            notes[each.name] = failure(error)
    times = timing.race(gpu, loads, timing.BURST)
    ratios = {name: statistics.ratio(rounds, times["full"]) for name, rounds in times.items()}
    rows = [["ablation", "time", "interval", "config", "note", "what"]]
    for each in sorted(ABLATIONS, key=lambda each: -ratios.get(each.name, statistics.Ratio(0)).value):
        ratio = ratios.get(each.name, statistics.Ratio())
        numbers = [f"{ratio.value:.3f}", f"{ratio.low:.3f}..{ratio.high:.3f}", config_name(configs[each.name])]
        rows.append([each.name, *numbers, notes[each.name], each.what])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("ablate", __doc__)
    parser.add_argument("cases", nargs="*", default=["paper/21"], help="SET/NUMBER, or a case as JSON")
    options = parser.parse_args(argv)
    device, text = machine.gpu("ablate"), ""
    for case in map(sets.pick, options.cases):
        rows = measure(Task.make(case), device)
        text += f"## {sets.label(case)}\n\n{report.table(rows, markdown=True)}\n\n"
        report.write((options.out or machine.record(device)) / "ablate.md", text)
        print(f"{sets.label(case)}\n{report.table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
