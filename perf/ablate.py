"""Takes techniques away one at a time, or puts a classic mistake in, and times each against the full kernel in one run.

python -m perf.ablate paper/21 paper/9

``time`` is the altered kernel's time over the full kernel's, in interleaved rounds of one run: 1.08 is 8 % slower. The table is
ranked by it: the map of what matters. An ablation is another configuration of attn_fwd, a subclass that takes another option or
launch value, or a patch in perf/ablations/, whose first line says what it does. An altered kernel has to be right to be timed;
what spills says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track

from rawattn import timing
from rawattn.device import Device
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwd, Config
from rawattn.operation import Forward
from rawattn.select import select
from rawattn.variant import Option, order, softmax

from .lib import command, machine, report, sets, statistics
from .lib.altered import PATCHES, Patched
from .lib.checking import Check, failure
from .lib.compiling import Pool, faults
from .lib.ours import config_name, launched, plan_of
from .lib.task import Task

LEAKS = ("leaky",)  # patches that are for perf.prove


class OneGroup(AttnFwd):
    """Takes all heads in turn."""

    def values(self, op: Forward, config: Config, device: Device) -> dict[str, float]:
        return {**super().values(op, config, device), "l2_head_group": op.heads * op.batch, "last_group": 0}


class LazySoftmax(AttnFwd):
    """Has a softmax that looks for the maximum in every tile."""

    def options(self, op: Forward, config: Config) -> dict[str, Option]:
        return {**super().options(op, config), "Softmax": softmax.LazyRescale()}


class ConstantTimeSoftmax(AttnFwd):
    """Has a softmax that rescales at every tile."""

    def options(self, op: Forward, config: Config) -> dict[str, Option]:
        return {**super().options(op, config), "Softmax": softmax.ConstantTime()}


class OtherOrder(AttnFwd):
    """Lets warpgroups take turns where they do not, and not where they do."""

    def order(self, op: Forward, config: Config) -> Option:
        turns = isinstance(super().order(op, config), order.PingPong)
        return order.Unordered() if turns else order.PingPong()


@dataclasses.dataclass(frozen=True)
class Ablation:
    """One change of the kernel or its configuration."""

    name: str
    what: str
    kernel: AttnFwd = ATTN_FWD
    config: dict[str, int] = dataclasses.field(default_factory=dict)


ABLATIONS = [
    Ablation("full", "The kernel as it is."),
    Ablation("two_stages", "Rings of two K and V tiles.", config={"stages": 2}),
    Ablation("one_q_stage", "The next Q is not loaded ahead.", config={"q_stages": 1}),
    Ablation("one_consumer", "One consumer warpgroup of 64 rows.", config={"tile_q": 64}),
    Ablation("tiny_tiles", "Key tiles of 32 rows.", config={"tile_kv": 32}),
    Ablation("one_group", "No groups of heads for L2: all heads in turn.", OneGroup()),
    Ablation("lazy_softmax", "A maximum is looked for in every tile.", LazySoftmax()),
    Ablation("constant_time", "The softmax rescales at every tile, whatever the data.", ConstantTimeSoftmax()),
    Ablation("other_order", "Warpgroups issue their products in turns, or, where they do, whenever they like.", OtherOrder()),
    *(
        Ablation(path.stem, path.read_text(encoding="utf-8").partition("\n")[0], Patched(path.stem))
        for path in sorted(PATCHES.glob("*.patch"))
        if path.stem not in LEAKS
    ),
]


def compile_all(op: Forward, configs: dict[str, Config], device: Device) -> None:
    """Fills the cache in parallel processes; what cannot be made says so when its turn comes."""
    with Pool() as pool:
        for each in ABLATIONS:
            with contextlib.suppress(Exception):
                pool.submit(launched(each.kernel, op, configs[each.name], device))
        for _ in pool.results():
            pass


def measure(task: Task, device: Device) -> list[list[str]]:
    """The table of all ablations on a case, the costliest first; what was not timed comes last, with the reason."""
    op, check, gpu = sets.operation(task.case), Check(task), timing.Gpu()
    chosen = select(op, device, ATTN_FWD.name).config
    configs = {each.name: dataclasses.replace(chosen, **each.config) for each in ABLATIONS}
    loads, notes = dict[str, timing.Load](), dict[str, str]()
    compile_all(op, configs, device)
    for each in track(ABLATIONS, "checking", console=Console(stderr=True), transient=True):
        if each.config and configs[each.name] == chosen:
            notes[each.name] = "is so already"
            continue
        try:
            plan = plan_of(task, each.kernel, configs[each.name])
            call = timing.Call(lambda plan=plan: plan.run(task.q, task.k, task.v, *task.packed[:2]))  # type: ignore[misc]
            notes[each.name] = ", ".join(filter(None, map(faults, plan.binaries)))
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
