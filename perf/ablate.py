"""Takes techniques away one at a time, or puts a classic mistake in, and times each against the full kernel in one run.

python -m perf.ablate paper/21 paper/9
python -m perf.ablate paper-bwd/22 paper-bwd/34      attn_bwd_mma, and FlashAttention 2 beside it

``time`` is the altered kernel's time over the full kernel's, in interleaved rounds of one run: 1.08 is 8 % slower. The table is
ranked by it: the map of what matters. An ablation is another configuration of attn_fwd, or of attn_bwd_mma for gradients, a
subclass that takes another option or launch value, or a patch in perf/ablations/, whose first line says what it does. An altered
kernel has to be right to be timed, but for bounds, which are wrong on purpose; what spills says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

import rawattn
from rawattn.command import timing
from rawattn.driver.device import Device
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwd, AttnFwdConfig
from rawattn.kernel.program import Launch
from rawattn.kernel.tiling import QueryTiles
from rawattn.operation import Backward, Forward
from rawattn.operation.captures import take
from rawattn.runtime.select import select
from rawattn.variant import Option, scheduler, softmax

from .lib import backward, command, machine, report, sets, statistics
from .lib.altered import PATCHES, AlteredBwdMma, Patched, patched_bwd_mma
from .lib.checking import Check, failure
from .lib.compiling import Pool, faults
from .lib.ours import config_name, launched, plan_of
from .lib.task import Task

LEAKS = ("leaky",)  # patches that are for perf.prove
BOUND = "Wrong on purpose"  # so begins what says of an ablation that it is timed without being right


class OneGroup(AttnFwd):
    """Takes all heads in turn."""

    def tiles(self, op: Forward, config: AttnFwdConfig, device: Device) -> QueryTiles:
        tiles = super().tiles(op, config, device)
        return tiles._replace(group=tiles.heads)


class LazySoftmax(AttnFwd):
    """Has a softmax that looks for the maximum in every tile."""

    def options(self, op: Forward, config: AttnFwdConfig) -> dict[str, Option]:
        return {**super().options(op, config), "Softmax": softmax.LazyRescale()}


class ConstantTimeSoftmax(AttnFwd):
    """Has a softmax that rescales at every tile."""

    def options(self, op: Forward, config: AttnFwdConfig) -> dict[str, Option]:
        return {**super().options(op, config), "Softmax": softmax.ConstantTime()}


class OtherOrder(AttnFwd):
    """Lets warpgroups take turns where they do not, and not where they do."""

    def order(self, op: Forward, config: AttnFwdConfig) -> Option:
        turns = isinstance(super().order(op, config), scheduler.PingPong)
        return scheduler.Unordered() if turns else scheduler.PingPong()


def one_head(launch: Launch, op: Backward) -> dict[str, Any]:
    """Takes the key tiles of one head after those of another."""
    heads = op.forward.kv_heads * op.forward.batch
    return {"values": {**launch.values, "l2_head_group": 1, "last_group": heads - 1}}


@dataclasses.dataclass(frozen=True)
class Ablation:
    """One change of the kernel or its configuration."""

    name: str
    what: str
    kernel: Any = ATTN_FWD
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def patches(folder: str) -> dict[str, str]:
    """Returns for each patch of a folder what it says that it does."""
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0] for path in sorted((PATCHES / folder).glob("*.patch"))}


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
    *(Ablation(name, what, Patched(name)) for name, what in patches("").items() if name not in LEAKS),
    *(Ablation(f"elements/{name}", what, Patched(f"elements/{name}")) for name, what in patches("elements").items()),
]
ABLATIONS_BWD_MMA = [
    Ablation("full", "The kernel as it is.", ATTN_BWD_MMA),
    Ablation("unordered", "Parts of dq meet in any order.", ATTN_BWD_MMA, {"store": "unordered"}),
    Ablation("alternating", "Groups of heads take key tiles up and down in turns.", ATTN_BWD_MMA, {"direction": "Alternating"}),
    Ablation("one_do_stage", "The next dO is loaded when this one was read.", ATTN_BWD_MMA, {"do_stages": 1}),
    Ablation("one_head", "One head's key tiles after another's.", AlteredBwdMma(one_head)),
    *(Ablation(name, what, patched_bwd_mma(name)) for name, what in patches("attn_bwd_mma").items()),
]


def compile_all(op: Any, ablations: Sequence[Ablation], configs: dict[str, Any], device: Device) -> None:
    """Fills the cache in parallel processes; what cannot be made says so when its turn comes."""
    with Pool() as pool:
        for each in ablations:
            with contextlib.suppress(Exception):
                pool.submit(launched(each.kernel, op, configs[each.name], device))
        for _ in pool.results():
            pass


def inputs_of(task: Task) -> tuple[Any, ...]:
    """Returns the arrays that a plan of the task's operation is given."""
    inputs = (task.q, task.k, task.v, *task.packed[:2])
    if not sets.is_backward(task.case):
        return (*inputs, *take({"mask": None, "score": None} | task.functions)[1])
    o, lse = rawattn.attention(*inputs, return_lse=True, **task.case.options)
    return (backward.gradient(task), *inputs, o, lse)


def measure(task: Task, device: Device) -> list[list[str]]:
    """The table of all ablations on a case, the costliest first; what was not timed comes last, with the reason."""
    op, gpu, of_gradients = sets.operation(task.case), timing.Gpu(), sets.is_backward(task.case)
    ablations, check = (ABLATIONS_BWD_MMA, backward.Check(task)) if of_gradients else (ABLATIONS, Check(task))
    chosen, inputs = select(op, device, ablations[0].kernel.name).config, inputs_of(task)
    configs = {each.name: dataclasses.replace(chosen, **each.config) for each in ablations}
    loads, notes, full = dict[str, timing.Load](), dict[str, str](), ablations[0].kernel.lower(op, chosen, device)
    compile_all(op, ablations, configs, device)
    for each in track(ablations, "checking", console=Console(stderr=True), transient=True):
        try:
            if each.name != "full" and each.kernel.lower(op, configs[each.name], device) == full:
                notes[each.name] = "changes nothing here"
                continue
            plan = plan_of(task, each.kernel, configs[each.name])
            call = timing.Call(lambda plan=plan: plan.run(*inputs))  # type: ignore[misc]
            notes[each.name] = ", ".join(filter(None, map(faults, plan.binaries)))
            if not each.what.startswith(BOUND):
                check(call)
            loads[each.name] = gpu.load(call)
        except Exception as error:  # what a mistake leads to is a result
            notes[each.name] = failure(error)
    if of_gradients:
        ablations, configs = [*ablations, Ablation("fa2", "FlashAttention 2.")], configs | {"fa2": None}
        try:
            loads["fa2"] = gpu.load(backward.prepare("fa2", task))
        except Exception as error:  # of a peer
            notes["fa2"] = failure(error)
    times = timing.race(gpu, loads, timing.BURST)
    ratios = {name: statistics.ratio(rounds, times["full"]) for name, rounds in times.items()}
    rows = [["ablation", "time", "interval", "config", "what", "note"]]
    for each in sorted(ablations, key=lambda each: -ratios.get(each.name, statistics.Ratio(0)).value):
        ratio = ratios.get(each.name, statistics.Ratio())
        config = configs[each.name] and config_name(configs[each.name])
        numbers = [f"{ratio.value:.3f}", f"{ratio.low:.3f}..{ratio.high:.3f}", config or ""]
        rows.append([each.name, *numbers, each.what, notes.get(each.name, "")])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("ablate", __doc__)
    parser.add_argument("cases", nargs="*", default=["paper/21"], help="SET/NUMBER, or a case as JSON; default: paper/21")
    options = parser.parse_args(argv)
    device, facts, found = machine.gpu("ablate"), machine.facts(), dict[str, list[list[str]]]()
    folder, cases = options.out or machine.record(device), [*map(sets.pick, options.cases)]
    name = "ablate-bwd" if any(map(sets.is_backward, cases)) else "ablate"
    try:
        for case in cases:
            found[sets.label(case)] = rows = measure(Task.make(case), device)
            parts = [f"## {label}\n\n{report.table(each, markdown=True)}\n" for label, each in found.items()]
            report.write(folder / f"{name}.md", "\n".join(["# Ablations\n", f"{report.origin(facts)}\n", *parts]))
            report.write(folder / f"{name}.json", json.dumps({"machine": facts, "tables": found}, indent=1))
            print(f"{sets.label(case)}\n{report.table(rows)}\n", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: {len(found)} cases are kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
