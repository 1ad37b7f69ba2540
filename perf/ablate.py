"""Takes techniques away one at a time, or puts a classic mistake in, and times each against the full kernel in one run.

python -m perf.ablate paper/21 [--rounds 5]

What a configuration or a launch value expresses is changed there; the rest are the patches in perf/ablations/ (each says in its
first line what it does). The table is ranked by what the kernel loses: the map of what matters. "spills" and "wrong" are said.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rawattn.choose import choose
from rawattn.compiler import Binary
from rawattn.device import Device

from . import altered, command, machine, report, sets, statistics, timing
from .checking import Check, failure
from .compiling import faults, without_lse
from .peers import Task, config_name

LEAKS = ("leaky",)  # patches that are for perf.prove


@dataclasses.dataclass(frozen=True)
class Ablation:
    """One change of a kernel and its configuration."""

    name: str
    what: str
    kernel: Callable[[Any], Any] = lambda kernel: kernel
    config: dict[str, int] = dataclasses.field(default_factory=dict)


def one_group(found: dict[str, float], problem: Any, *_: Any) -> dict[str, float]:
    return {**found, "head_group": problem.heads * problem.batch, "last_group": 0}


def ablations() -> list[Ablation]:
    """The full kernel first."""
    configs = {
        "two_stages": ("Rings of two K and V tiles.", {"stages": 2}),
        "one_q_stage": ("The next Q is not loaded ahead.", {"q_stages": 1}),
        "one_consumer": ("One consumer warpgroup of 64 rows.", {"tile_q": 64}),
        "tiny_tiles": ("Key tiles of 32 rows.", {"tile_kv": 32}),
    }
    found = [Ablation("full", "The kernel as it is.")] + [Ablation(name, what, config=c) for name, (what, c) in configs.items()]
    grouped = "Tiles of all heads are interleaved, however many keys and values that keeps in flight."
    found.append(Ablation("no_l2_groups", grouped, lambda kernel: altered.kernel(kernel, values=one_group)))
    for path in sorted(altered.PATCHES.glob("*.patch")):
        if path.stem not in LEAKS:
            what = path.read_text().partition("\n")[0]
            found.append(Ablation(path.stem, what, lambda kernel, name=path.stem: altered.kernel(kernel, (name,))))
    return found


def prepare(task: Task, kernel: Any, config: Any, check: Check) -> tuple[timing.Call, str]:
    """An altered kernel ready to be timed, and what is to be said of it. Raises what compiling and running it raises."""
    plan = altered.plan(task, kernel, config)
    call = timing.Call(lambda: plan.run(task.q, task.k, task.v, *task.cu))
    error = verify(call, check, task.q, (*task.q.shape[:-1], task.case.head_dim_v))
    assert isinstance(plan.binary, Binary)
    return call, ", ".join(
        filter(None, [faults(plan.binary), "" if error < TOLERANCE[task.case.dtype] else f"wrong ({error:.1e})"])
    )


def measure(task: Task, device: Device, protocol: timing.Protocol) -> list[list[str]]:
    """The table of all ablations on a case."""
    choice, check, gpu = choose(without_lse(task.case.problem), device), Check(task, 0), timing.Gpu()
    loads, notes = {}, {}
    for ablation in ablations():
        config = dataclasses.replace(choice.config, **ablation.config)
        if ablation.config and config == choice.config:
            notes[ablation.name] = "is so already"
            continue
        try:
            call, notes[ablation.name] = prepare(task, ablation.kernel(choice.kernel), config, check)
            loads[ablation.name] = gpu.load(call)
        except Exception as error:  # a mistake that does not even run is a result
            notes[ablation.name] = failure(error)
    times = timing.race(gpu, loads, protocol)
    ratios = {name: statistics.ratio(rounds, times["full"]) for name, rounds in times.items()}
    rows = [["ablation", "time", "interval", "note", "what", "config"]]
    for ablation in sorted(ablations(), key=lambda each: -ratios[each.name].value if each.name in ratios else 0):
        ratio = ratios.get(ablation.name)
        numbers = [f"{ratio.value:.3f}", f"{ratio.low:.3f}..{ratio.high:.3f}"] if ratio else ["-", "-"]
        config = config_name(dataclasses.replace(choice.config, **ablation.config))
        rows.append([ablation.name, *numbers, notes.get(ablation.name, ""), ablation.what, config])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("ablate", __doc__)
    parser.add_argument("cases", nargs="*", default=["paper/21"], help="SET/NUMBER, or a case as JSON")
    parser.add_argument("--rounds", type=int, default=timing.BURST.rounds)
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results; by default perf/record/DEVICE")
    options = parser.parse_args(argv)
    device = machine.gpu("ablate")
    if device is None:
        return 2
    text = ""
    for spec in options.cases:
        case = sets.pick(spec)
        rows = measure(Task.make(case), device, dataclasses.replace(timing.BURST, rounds=options.rounds))
        text += f"## {sets.label(case)}\n\n{report.table(rows, markdown=True)}\n\n"
        report.write((options.out or machine.record(device)) / "ablate.md", text)
        print(f"{sets.label(case)}\n{report.table(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
