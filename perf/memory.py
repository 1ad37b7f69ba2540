"""Measures the memory that a forward and its backward take at most, ours and each peer's, beside the inputs and do.

python -m perf.memory --fa3 fa3.so.xz                 the shapes of the papers; writes memory.json and memory.md
python -m perf.memory --set gqa --peers cudnn,fa2     other shapes

MiB as torch's allocator counts them: o, what is kept for the backward, scratch, dq, dk and dv. ``least`` is o, lse and the
gradients alone. Every contender has run the shape once before, so that a library's own workspace is not new.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rawattn.array.array import DTYPES
from rawattn.command import timing
from rawattn.testing import Case

from .lib import backward, command, differentiable, machine, report, sets
from .lib.checking import failure
from .lib.statistics import geometric_mean
from .lib.task import Task

PEERS = "fa3,cudnn,fa2"


def least(case: Case) -> int:
    """Bytes of o, lse, dq, dk and dv."""
    outputs = (*case.op.outputs, *case.op.inputs[:3])
    return sum(math.prod(each.shape) * DTYPES[each.element].itemsize for each in outputs)


def step(attend: differentiable.Attend, task: Task) -> Callable[[], Any]:
    """A forward and backward, which keeps nothing."""
    import torch

    task.refuse("lengths", "window", "softcap")
    leaves, d_o = [x.requires_grad_() for x in (task.q, task.k, task.v)], backward.gradient(task)
    return lambda: torch.autograd.grad(attend(task.q, task.k, task.v, task.case.causal), leaves, d_o)


def measure(gpu: timing.Gpu, cases: Sequence[Case], contenders: dict[str, differentiable.Attend]) -> list[dict[str, Any]]:
    """For each case the MiB of each contender, or why there are none."""
    found = []
    for case in cases:
        task = Task.make(case, device=gpu.device)
        row: dict[str, Any] = {"label": sets.label(case), "least": least(case) / 2**20, "failures": {}}
        for name, attend in contenders.items():
            try:
                (run := step(attend, task))()
                row[name] = gpu.peak_bytes(run) / 2**20
            except Exception as error:  # a peer may raise anything; the others go on
                row["failures"][name] = failure(error)
        found.append(row)
    return found


def table(found: list[dict[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """MiB of each shape, then ours over each peer's as a geometric mean and at most."""
    rows = [["case", "least", *names]]
    for row in found:
        rows.append([row["label"], f"{row['least']:.1f}", *(f"{row[name]:.1f}" if name in row else "-" for name in names)])
    ratios = {name: [row["ours"] / row[name] for row in found if name in row and "ours" in row] for name in ("least", *names)}
    for title, of in (("ours over, mean", geometric_mean), ("ours over, most", max)):
        rows.append([title, *(f"{of(values):.3f}" if values else "-" for values in ratios.values())])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("memory", __doc__)
    parser.add_argument("--set", default="paper", help="comma-separated names of perf.bench")
    parser.add_argument("--peers", default=PEERS, help="comma-separated; fa3 where its library is given")
    parser.add_argument("--fa3", metavar="FILE", help="FlashAttention 3 as a torch library, .so or .so.xz")
    options = parser.parse_args(argv)
    device, facts = machine.gpu("memory"), machine.facts()
    contenders = differentiable.contenders(options.peers, options.fa3)
    found = measure(timing.Gpu(), sets.load(options.set, None), contenders)
    folder, rows = options.out or machine.record(device), table(found, [*contenders])
    report.write(folder / "memory.json", json.dumps({"machine": facts, "set": options.set, "rows": found}, indent=1) + "\n")
    text = f"# Peak memory of a forward and its backward, MiB\n\n{report.origin(facts)}\n\n{report.table(rows, markdown=True)}\n"
    report.write(folder / "memory.md", text)
    failures = [f"{row['label']}: {name}: {why}" for row in found for name, why in row["failures"].items()]
    print("\n".join([*failures, report.table(rows)]))
    return int(any("ours" in row["failures"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
