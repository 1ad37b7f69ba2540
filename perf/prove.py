"""Proves what the library promises of its results: the same bits on every run, no reach beyond the inputs, and time that does not
depend on the data, as far as a test can say.

python -m perf.prove                                  all three
python -m perf.prove timing --launches 200000         for each class of data

bits: every run has the same bits, on four streams, replayed from a graph, in another process. poison: NaN between and beside the
rows of the inputs, and under the output, changes no bit.

timing compares classes of data by Welch's t-test, of first order (means) and second (variances), on the cycles that the
warpgroups of a launch take from their first logits to their last store: a fixed input against random ones, large logits, logits
near zero, and one key that takes all, the first or the last that is read. Launches of all classes alternate at random on the same
memory, so that drift hits all alike. |t| < 4.5 is passed. What comes before the first logits is a wait for memory, which has
another clock: the power that data takes moves one against the other (perf/notes/attn_fwd.md). It tests three kernels:

  constant_time         constant_time=True, which no value makes branch: must pass
  default               trusts the first tile's maximum and mends what it was wrong about: its time may follow the logits' range
  constant_time-leaky   the first, but it skips what is far below the maximum: must be caught, or the test sees nothing

The test does not see power, clocks, and what other kernels could learn from caches, nor exclude a leak below its noise. Exit
status 1 where bits or poison fail, where the first kernel does not pass, or where the last is not caught.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

import rawattn
from rawattn.command import timing
from rawattn.driver.device import Device
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.operation import Forward
from rawattn.runtime.select import select
from rawattn.testing import Case
from rawattn.variant import Option
from rawattn.variant.field import Field, Fields

from .lib import command, machine, report, sets
from .lib.altered import Patched
from .lib.ours import our_plan, ours, plan_of
from .lib.statistics import welch_t
from .lib.task import Task

LIMIT = 4.5
SLOTS = 256  # launches whose clocks are read together
CLASSES = ("ordinary", "random", "large", "near_zero", "early_key", "late_key")
TIMED = sets.dense(1, 1024, 8, 64, False)  # one work for each block
INPUTS = 64  # of each class
EXPECTED = {"constant_time": "must pass", "default": "may leak", "constant_time-leaky": "must be caught"}
Curve = list[tuple[int, float, float, float]]  # launches so far, t of first and of second order, and how many cycles longer


@dataclasses.dataclass(frozen=True)
class Clocked(Option):
    """A softmax that also reads the clock."""

    base: Option

    @property
    def cuda_type(self) -> str:
        return f"TimedSoftmax<{self.base.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.base.sources, "../perf/lib/cycles.cuh")

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, Field("cycles", "i32*"))


class Timed(Patched):
    """attn_fwd that writes the cycles of each block's consumers to memory at ``pointer``, eight numbers a block."""

    def __init__(self, pointer: int, *patches: str) -> None:
        super().__init__(*patches)
        self.pointer = pointer

    def options(self, op: Forward, config: AttnFwdConfig) -> dict[str, Option]:
        found = super().options(op, config)
        return {**found, "Softmax": Clocked(found["Softmax"])}

    def values(self, op: Forward, config: AttnFwdConfig, device: Device) -> dict[str, float]:
        return {**super().values(op, config, device), "cycles": self.pointer}


def digest(output: Any) -> str:
    """Of a tensor of 16-bit numbers."""
    return hashlib.sha256(output.contiguous().view(timing.Gpu().torch.int16).cpu().numpy().tobytes()).hexdigest()


def bits(case: Case, runs: int) -> str:
    """Empty if every run has the same bits: on four streams, replayed from a graph, in another process; else which has not."""
    task, gpu = Task.make(case), timing.Gpu()
    torch, run, outputs = gpu.torch, ours(task, "ours").run, []
    expected, differing = run().view(torch.int16), torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in itertools.islice(itertools.cycle(streams), runs):
        with torch.cuda.stream(stream):
            wrong = (run().view(torch.int16) != expected).any()
        torch.cuda.current_stream().wait_stream(stream)
        differing += wrong
    if differing.item():
        return f"{differing.item()} of {runs} runs differ"
    plan = our_plan(task, "ours")
    graph = gpu.graph(timing.Call(lambda: outputs.append(plan())))
    for _ in range(20):
        outputs[-1].fill_(float("nan"))
        graph.issue()
        if not torch.equal(outputs[-1].view(torch.int16), expected):
            return "a graph's replay differs"
    code = f"from perf import prove\nprint(prove.digest(prove.ours(prove.Task.make(prove.{case!r}), 'ours').run()))"
    other = subprocess.run([sys.executable, "-c", code], cwd=machine.ROOT, capture_output=True, text=True)
    return "" if digest(expected) == other.stdout.strip() else f"another process differs: {other.stderr.strip()[-200:]}"


def poison(case: Case, runs: int) -> str:
    """Empty if NaN between and beside the rows of the inputs and under the output changes no bit."""
    found = set()
    for layout in ("contiguous", "padded", "packed"):
        each = dataclasses.replace(case, layout=layout)
        inputs, out = each.inputs("torch", "cuda"), each.out("torch", "cuda")
        lengths = (each.op.q_len, each.op.kv_len) if case.lengths is not None else ()
        (rawattn.attention_varlen if lengths else rawattn.attention)(*inputs, *lengths, out=out, **case.options)
        if not out.isfinite().all():
            return f"{layout}: the output is not finite"
        found.add(digest(out))
    return "" if len(found) == 1 else "the layouts differ"


def class_data(torch: Any, name: str) -> Any:
    """q, k, v of a class as one array. All are noise but for what the class is about: constants switch fewer transistors, and the
    power that this saves is a leak of the chip, not of the kernel."""
    data = torch.randn(3, 1, TIMED.q_len, TIMED.heads, TIMED.head_dim, device="cuda", dtype=torch.bfloat16)
    if name.endswith("key"):  # tiles are read from the last to the first
        data[0].abs_()
        data[1, :, -1 if name == "early_key" else 0] = 8
    data[0] *= {"large": 30, "near_zero": 1e-3}.get(name, 1)
    return data


def inputs_of(torch: Any, name: str) -> list[Any]:
    """As many different inputs for the class "random" as copies of one for the others, so that all come alike from memory."""
    data = [class_data(torch, name) for _ in range(INPUTS if name == "random" else 1)]
    return data if name == "random" else [data[0].clone() for _ in range(INPUTS)]


def cycles(device: Device, launches: int, constant_time: bool, *patches: str) -> tuple[Any, Any]:
    """Of launches in random order of classes: the class, and the cycles of a block's slowest warpgroup in the mean."""
    task, torch = Task.make(TIMED), timing.Gpu().torch
    op = sets.operation(TIMED, constant_time)
    config = select(op, device, ATTN_FWD.name).config
    clocks = torch.zeros(SLOTS, ATTN_FWD.grid(op, config, device), 8, dtype=torch.int32, device="cuda")
    plans = [plan_of(task, Timed(slot.data_ptr(), *patches), config, constant_time) for slot in clocks]
    pool = {name: inputs_of(torch, name) for name in CLASSES}
    q, k, v = inputs = torch.empty_like(pool["ordinary"][0])
    out = torch.empty_like(task.q)
    labels, found = np.random.default_rng(0).integers(len(CLASSES), size=launches // SLOTS * SLOTS), []
    for start in track(range(0, len(labels), SLOTS), "launching", console=Console(stderr=True), transient=True):
        for i, plan in enumerate(plans):
            data = pool[CLASSES[labels[start + i]]]
            inputs.copy_(data[(start // SLOTS + i) % len(data)])
            plan.run(q, k, v, out=out)
        found.append(clocks[..., : config.consumers].amax(-1).float().mean(-1))
    return labels, torch.cat(found).double().cpu().numpy()


def leakage(labels: Any, samples: Any, points: int = 40) -> dict[str, Curve]:
    """Returns how t against ``ordinary`` grew, for each other class."""
    found = {name: Curve() for name in CLASSES[1:]}
    for end in map(int, np.linspace(0, len(labels), points + 1)[1:]):
        first, *others = (samples[:end][labels[:end] == i] for i in range(len(CLASSES)))
        for name, other in zip(found, others, strict=True):
            longer = float(other.mean() - first.mean())
            found[name].append((end, welch_t(first, other, 1), welch_t(first, other, 2), longer))
    return found


def verdicts(found: dict[str, Curve]) -> tuple[list[list[str]], bool]:
    """A table of the last t of each class, and whether any is a leak."""
    rows = [["ordinary against", "launches of each", "cycles longer", "t of means", "t of variances", "verdict"]]
    for name, points in found.items():
        count, *t, longer = points[-1]
        verdict = "leaks" if max(map(abs, t)) >= LIMIT else "passed"
        rows.append([name, str(count // len(CLASSES)), f"{longer:+.2f}", *(f"{x:+.1f}" for x in t), verdict])
    return rows, any(row[-1] == "leaks" for row in rows)


def draw(found: dict[str, Curve], path: pathlib.Path) -> None:
    """|t| over launches: a leak grows with their square root, noise does not."""
    from matplotlib.figure import Figure

    axis = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for (name, points), (order, style) in itertools.product(found.items(), ((1, "-"), (2, ":"))):
        axis.plot([p[0] for p in points], [abs(p[order]) for p in points], style, label=f"{name}, order {order}")
    axis.axhline(LIMIT, color="black", linewidth=0.8)
    axis.set(xlabel="launches of all classes", ylabel="|t|", yscale="symlog")
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(path)


def leaks(device: Device, launches: int, folder: pathlib.Path, constant_time: bool, *patches: str) -> bool:
    """Tests whether a kernel's time depends on the data, and writes what it found."""
    name = "-".join(("constant_time" if constant_time else "default", *patches))
    labels, samples = cycles(device, len(CLASSES) * launches, constant_time, *patches)
    found, stem = leakage(labels, samples), f"prove-timing-{name}"
    rows, leaking = verdicts(found)
    title = f"timing, {name}: {EXPECTED[name]}, of {samples.mean():,.0f} cycles"
    facts = machine.facts()
    report.write(folder / f"{stem}.json", json.dumps({"machine": facts, "cycles": samples.mean(), "t": found}))
    parts = [f"# {title}", report.origin(facts), report.table(rows, markdown=True)]
    report.write(folder / f"{stem}.md", "\n\n".join(parts) + "\n")
    draw(found, folder / f"{stem}.svg")
    print(f"\n{title}\n{report.table(rows)}", flush=True)
    return leaking


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("prove", __doc__)
    parser.add_argument("what", nargs="*", default=["bits", "poison", "timing"], help="bits, poison, timing; by default all")
    parser.add_argument("--set", default="smoke", help="cases for bits and poison")
    parser.add_argument("--runs", type=int, default=1000, help="for bits")
    parser.add_argument("--launches", type=int, default=100_000, help="of each class of data")
    options = parser.parse_args(argv)
    device, bad = machine.gpu("prove"), False
    for check in (check for check in (bits, poison) if check.__name__ in options.what):
        for case in sets.load(options.set, None):
            why = check(case, options.runs)
            bad |= bool(why)
            print(f"{check.__name__}: {sets.label(case)}: {why or 'passed'}", flush=True)
    if "timing" in options.what:
        folder = options.out or machine.record(device)
        bad |= leaks(device, options.launches, folder, True)
        leaks(device, options.launches // 10, folder, False)
        bad |= not leaks(device, options.launches // 10, folder, True, "leaky")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
