"""Proves what the library promises of its results: the same bits on every run, no reach beyond the inputs, and time that does not
depend on the data, as far as a test can say.

python -m perf.prove                                  all three
python -m perf.prove timing --launches 200000         for each class of data
python -m perf.prove timing --demand                  exit status 1 where time depends on the data

timing compares classes of data by Welch's t-test, of first order (means) and second (variances), on the cycles that the blocks of
a launch take from their first work to their last store: a fixed input against random ones, and an ordinary fixed one against
large logits, logits near zero, and one key that takes all. Launches of all classes alternate at random on the same memory, so
that drift hits all alike. |t| < 4.5 is passed; a kernel that skips work by value must fail, or the test is worth nothing. What it
can not see: power, clocks, and what other kernels could learn from caches. What it can not exclude: a leak below its noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn.choose import choose
from rawattn.testing import Case
from rawattn.variant import Choice, Fields

from . import altered, command, machine, report, sets, timing
from .compiling import without_lse
from .peers import Task, our_plan, ours
from .statistics import Moments, welch_t

LIMIT = 4.5
SLOTS = 256  # launches whose clocks are read together
CLASSES = ("ordinary", "random", "large", "near_zero", "one_hot")
TIMED = sets.dense(1, 1024, 8, 64, False)  # one work for each block


@dataclasses.dataclass(frozen=True)
class Timed(Choice):
    """A schedule or a store that also writes the clock."""

    base: Choice
    wrapper: str

    @property
    def cuda_type(self) -> str:
        return f"{self.wrapper}<{self.base.cuda_type}>"

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.base.sources, "../perf/cycles.cuh")

    @property
    def fields(self) -> Fields:
        return (*self.base.fields, ("cycles", "i32*")) if self.wrapper == "TimedStore" else self.base.fields


def timed(kernel: Any, pointer: int, patches: tuple[str, ...] = ()) -> Any:
    """A kernel that writes its blocks' clocks to memory at ``pointer``, {begin, ends of the consumers} of each."""

    def choices(found: dict[str, Choice], *_: Any) -> dict[str, Choice]:
        return {**found, **{axis: Timed(found[axis], f"Timed{axis}") for axis in ("Schedule", "Store")}}

    return altered.kernel(kernel, patches, choices=choices, values=lambda found, *_: {**found, "cycles": pointer})


def identical(case: Case, runs: int) -> str:
    """Empty if every run has the same bits: on four streams, replayed from a graph, in another process; else which has not."""
    task = Task.make(case)
    torch, gpu, run = timing.Gpu().torch, timing.Gpu(), ours(task, "ours").run
    expected, differing = run().view(torch.int16), torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    for i in range(runs):
        with torch.cuda.stream(streams[i % 4]):
            wrong = (run().view(torch.int16) != expected).any()
        torch.cuda.current_stream().wait_stream(streams[i % 4])
        differing += wrong
    if differing.item():
        return f"{differing.item()} of {runs} runs differ"
    plan, outputs = our_plan(task, "ours"), []
    graph = gpu.graph(timing.Call(lambda: outputs.append(plan())))
    for _ in range(20):
        graph.issue()
        if not torch.equal(outputs[-1].view(torch.int16), expected):
            return "a graph's replay differs"
    words = [sys.executable, "-m", "perf.prove", "--child", json.dumps(sets.to_json(case))]
    other = subprocess.run(words, cwd=machine.ROOT, capture_output=True, text=True)
    return "" if digest(expected) == other.stdout.strip() else f"another process differs: {other.stderr.strip()[-200:]}"


def digest(output: Any) -> str:
    return hashlib.sha256(output.cpu().numpy().tobytes()).hexdigest()


def unpoisoned(case: Case) -> str:
    """Empty if NaN between and beside the rows of the inputs and under the output changes no bit."""
    import rawattn

    found = []
    for layout in ("contiguous", "padded", "packed"):
        each = dataclasses.replace(case, layout=layout)
        q, k, v, *cu = each.inputs("torch", "cuda")
        lengths = (each.problem.q_len, each.problem.kv_len) if cu else ()
        out = each.out("torch", "cuda")
        (rawattn.attention_varlen if cu else rawattn.attention)(q, k, v, *cu, *lengths, out=out, **case.options)
        if not out.isfinite().all():
            return f"{layout}: the output is not finite"
        found.append(digest(out.contiguous().view(timing.Gpu().torch.int16)))
    return "" if len(set(found)) == 1 else "the layouts differ"


def class_data(torch: Any, name: str, shape: tuple[int, ...]) -> Any:
    """q, k, v of a class as one array."""
    data = torch.randn(3, *shape, device="cuda", dtype=torch.bfloat16)
    if name == "one_hot":
        data[0], data[1] = 1, 0
        data[1, :, -1] = 8
    data[0] *= {"large": 30, "near_zero": 1e-3}.get(name, 1)
    return data


def cycles(launches: int, patches: tuple[str, ...] = (), seed: int = 0) -> tuple[Any, Any]:
    """(class, cycles of a block in the mean) of launches in random order of classes."""
    task, rng = Task.make(TIMED), np.random.default_rng(seed)
    torch = timing.Gpu().torch
    choice = choose(without_lse(TIMED.problem), altered.driver.device(0))
    grid = choice.kernel.grid(without_lse(TIMED.problem), choice.config, altered.driver.device(0))
    clocks = torch.zeros(SLOTS, grid, 4, dtype=torch.int32, device="cuda")
    slots = [timed(choice.kernel, each.data_ptr(), patches) for each in clocks]
    plans = [altered.plan(task, kernel, choice.config) for kernel in slots]
    shape = tuple(task.q.shape)
    pool = {name: [class_data(torch, name, shape) for _ in range(64 if name == "random" else 1)] for name in CLASSES}
    inputs, out = torch.empty_like(pool["ordinary"][0]), torch.empty_like(task.q)
    labels, found = rng.integers(len(CLASSES), size=launches // SLOTS * SLOTS), []
    for start in range(0, len(labels), SLOTS):
        for plan, label in zip(plans, labels[start : start + SLOTS], strict=True):
            data = pool[CLASSES[label]]
            inputs.copy_(data[start % len(data)])
            plan.run(*inputs, out=out)
        found.append((clocks[..., 1 : 1 + choice.config.consumers] - clocks[..., :1]).amax(-1).float().mean(-1))
    return labels, torch.cat(found).double().cpu().numpy()


def leakage(labels: Any, samples: Any, points: int = 40) -> dict[str, list[tuple[int, float, float]]]:
    """For each class but ``ordinary``: (launches so far, t of first order, t of second order) against it, at some points."""
    sums, found = [Moments() for _ in CLASSES], {name: [] for name in CLASSES[1:]}  # type: Any
    cuts = np.linspace(0, len(labels), points + 1).astype(int)
    for begin, end in zip(cuts, cuts[1:], strict=False):
        part = labels[begin:end], samples[begin:end]
        sums = [total + Moments.of(part[1][part[0] == i]) for i, total in enumerate(sums)]
        for i, name in enumerate(CLASSES[1:], 1):
            found[name].append((int(end), welch_t(sums[0], sums[i], 1), welch_t(sums[0], sums[i], 2)))
    return found


def verdicts(found: dict[str, list[tuple[int, float, float]]]) -> tuple[list[list[str]], bool]:
    """A table of the last t of each class, and whether any is a leak."""
    rows = [["ordinary against", "launches", "t, means", "t, variances", ""]]
    for name, points in found.items():
        count, *t = points[-1]
        rows.append([name, str(count), *(f"{x:+.1f}" for x in t), "leaks" if max(map(abs, t)) >= LIMIT else "passed"])
    return rows, any(row[-1] == "leaks" for row in rows)


def draw(found: dict[str, list[tuple[int, float, float]]], path: pathlib.Path) -> None:
    """|t| over launches: a leak grows with their square root, noise does not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, points in found.items():
        for order in (1, 2):
            style = "-" if order == 1 else ":"
            axis.plot([p[0] for p in points], [abs(p[order]) for p in points], style, label=f"{name}, order {order}")
    axis.axhline(LIMIT, color="black", linewidth=0.8)
    axis.set(xlabel="launches of all classes", ylabel="|t|", yscale="symlog")
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(path)


def prove_timing(launches: int, folder: pathlib.Path) -> tuple[bool, bool]:
    """Whether the product's kernel leaks, and whether the leaky one is caught."""
    found = leakage(*cycles(len(CLASSES) * launches))
    rows, leaks = verdicts(found)
    control, caught = verdicts(leakage(*cycles(len(CLASSES) * launches // 10, ("leaky",))))
    text = f"{report.table(rows, markdown=True)}\n\nThe leaky kernel\n\n{report.table(control, markdown=True)}\n"
    report.write(folder / "prove-timing.md", text)
    report.write(folder / "prove-timing.json", json.dumps({"machine": machine.facts(), "t": found}))
    draw(found, folder / "prove-timing.svg")
    print(f"{report.table(rows)}\nthe leaky kernel {'is' if caught else 'is NOT'} caught:\n{report.table(control)}")
    return leaks, caught


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("prove", __doc__)
    parser.add_argument("what", nargs="*", default=["bits", "poison", "timing"], help="bits, poison, timing")
    parser.add_argument("--set", default="smoke", help="cases for bits and poison")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--launches", type=int, default=100_000, help="of each class of data")
    parser.add_argument("--demand", action="store_true", help="fail where time depends on the data")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results; by default perf/record/DEVICE")
    parser.add_argument("--child", help="print the digest of a case's output")
    options = parser.parse_args(argv)
    device = machine.gpu("prove")
    if device is None:
        return 2
    if options.child:
        print(digest(ours(Task.make(sets.pick(options.child)), "ours").run().view(timing.Gpu().torch.int16)))
        return 0
    bad = False
    checks = {"bits": lambda case: identical(case, options.runs), "poison": unpoisoned}
    for name in (name for name in checks if name in options.what):
        for case in sets.load(options.set, None):
            why = checks[name](case)
            bad |= bool(why)
            print(f"{name}: {sets.label(case)}: {why or 'passed'}", flush=True)
    if "timing" in options.what:
        leaks, caught = prove_timing(options.launches, options.out or machine.record(device))
        bad |= not caught or (leaks and options.demand)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
