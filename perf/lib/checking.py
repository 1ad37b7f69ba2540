"""This module checks timed outputs: it compares sampled rows with the float64 reference, and looks for NaN in all the output."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import rawattn.reference
from rawattn.command.timing import Call
from rawattn.operation.functions import is_function
from rawattn.variant import Option

from .functions import of_part
from .task import Task, Unserved

TOLERANCE = {"bf16": 8e-3, "fp16": 1e-3, "fp32": 4e-6}  # of the relative error; peers stand at 2e-3, 3e-4 and 1e-6
SAMPLED = 64  # rows that are compared with the reference, of the first and the last head of the first and the last batch


class Check:
    """The reference of a task's sampled rows, made once for all contenders."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        case, count = task.case, task.q.shape[-3]
        self.task = task
        self.rows = np.unique(np.r_[0, count - 1, np.random.default_rng(seed).integers(count, size=SAMPLED)])
        batches: list[Any] = [...] if task.packed else [slice(b, b + 1) for b in sorted({0, case.batch - 1})]
        self.places = [(batch, head) for batch in batches for head in sorted({0, case.heads - 1})]
        cu = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), (x.tolist() for x in task.packed[:2]), strict=bool(task.packed)))
        self.expected = []
        for batch, head in self.places:
            kv = head // (case.heads // case.kv_heads)
            q, k, v = task.q[batch][..., [head], :], task.k[batch][..., [kv], :], task.v[batch][..., [kv], :]
            options = part_of(case.options | task.functions, 0 if batch is ... else batch.start, head)
            self.expected.append(rawattn.reference.attention(q, k, v, rows=self.rows.tolist(), **cu, **options))

    def __call__(self, call: Call) -> float:
        """The relative error of a call, whose output memory held NaN before: the allocator hands it the block just filled.

        Raises ArithmeticError where the error is above the tolerance, or an element of the output is not finite.
        """
        with call.context():
            poison = self.task.q.new_full(self.task.o_shape, math.nan)
            del poison
            error = self.error(call.view(call.run()))
        if not error < TOLERANCE[self.task.case.dtype]:
            raise ArithmeticError(f"relative error {error:.2g}")
        return error

    def error(self, output: Any) -> float:
        """In the Euclidean norm; NaN where any element of the whole output is not finite."""
        found = [output[batch][..., self.rows, head : head + 1, :].double() for batch, head in self.places]
        square = sum(float(((a - b) ** 2).sum()) for a, b in zip(found, self.expected, strict=True))
        size = sum(float((b**2).sum()) for b in self.expected)
        return math.sqrt(square / size) if bool(output.isfinite().all()) else math.nan


ALIKE = 2e-2  # most that two right results in 16 bits are apart, in the Euclidean norm


def differing(outputs: dict[str, tuple[Any, ...]]) -> dict[str, float]:
    """Finds contenders, by name, whose outputs are apart from ours, and by how much; where all peers' are, ours are wrong."""
    if "ours" not in outputs:
        return {}
    apart = {name: max(map(_distance, each, outputs["ours"])) for name, each in outputs.items()}
    wrong = {name: distance for name, distance in apart.items() if not distance < ALIKE}
    peers = [name for name in apart if name.partition(":")[0] != "ours"]
    return {"ours": min(apart[name] for name in peers)} if peers and not {*peers} - {*wrong} else wrong


def _distance(a: Any, b: Any) -> float:
    """Relative to b; infinite where an element is not finite."""
    apart = float((a.float() - b.float()).norm() / b.float().norm())
    return apart if math.isfinite(apart) else math.inf


@dataclasses.dataclass(frozen=True)
class PartScore(Option):
    """A score, where the first batch and head are not the score's."""

    base: Any
    batch: int
    head: int

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return self.base.logit(xp, s, self.batch + batch, self.head + head, q, kv)


def part_of(options: dict[str, Any], batch: int, head: int) -> dict[str, Any]:
    """The options of a call for arrays that are a batch and one head of the call's."""
    found = dict(options)
    if "sinks" in options:
        found["sinks"] = options["sinks"][head : head + 1]
    if (keys := options.get("keys")) is not None:
        part = keys.indices[batch : batch + 1, head : head + 1]
        found["keys"] = dataclasses.replace(keys, indices=part)
    for role in ("mask", "score"):
        if is_function(options.get(role)):
            found[role] = of_part(role, options[role], batch, head)
        elif role == "score" and role in options:
            found[role] = PartScore(options[role], batch, head)
    return found


def failure(error: Exception) -> str:
    """An exception in one short line, without the folder that a CompileError names: it is of one machine."""
    text = str(error).strip().partition("\n")[0].partition(" (all that NVRTC was given")[0]
    return text if isinstance(error, (Unserved, ArithmeticError)) else f"{type(error).__name__}: {text}"[:200]
