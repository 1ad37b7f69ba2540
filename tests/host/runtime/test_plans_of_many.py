"""Plans of an operation that has as many inputs as a call gives, and several outputs: nothing between the public calls and the
launch knows an operand by its name. And of the backward, which has three launches. No GPU is needed."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.array import making, reading
from rawattn.array.array import Array
from rawattn.compile.compiler import Source
from rawattn.driver.device import Device
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.kernel import render
from rawattn.kernel.base import Kernel
from rawattn.kernel.program import Buffer, Launch, Program
from rawattn.operation import OPERATIONS, Operation, from_json
from rawattn.operation.operand import PLAIN, Layout, Operand, layout_of
from rawattn.runtime import calls, explain, request, select
from rawattn.runtime.plan import Plan
from rawattn.variant.field import Field, Pointer, Scratch, View
from tests.host.runtime.test_bound_call import LAUNCHED, calls_kept, forget, gpu, keys_kept

torch = pytest.importorskip("torch")
fixture = gpu  # its fixture, for this file too


@dataclasses.dataclass(frozen=True)
class Extremes(Operation):
    """The least and the largest of ``count`` arrays, element by element."""

    count: int
    shape: tuple[int, ...]
    layout: Layout = PLAIN

    number, flops, selection_key = "fp32", 0, ("extremes",)

    @classmethod
    def input_names(cls, count: int) -> tuple[str, ...]:
        return tuple(f"parts[{i}]" for i in range(count))

    @classmethod
    def of_call(cls, arrays: dict[str, Array], options: Mapping[str, Any], lengths: tuple[Any, ...]) -> Extremes:
        if not arrays:
            raise ProblemError("parts is empty; give one array at least.")
        return cls(len(arrays), tuple(arrays["parts[0]"].shape), layout_of(arrays.items()))

    @property
    def inputs(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, "fp32", self.shape) for name in self.input_names(self.count))

    @property
    def outputs(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, "fp32", self.shape, "out", contiguous=True) for name in ("least", "largest"))

    @property
    def kind(self) -> tuple[Any, ...]:
        return (type(self), self.count)

    def layout_of(self, arrays: Mapping[str, Array]) -> Layout:
        return layout_of(arrays.items())

    def rounded(self) -> Extremes:
        return self

    def to_json(self) -> dict[str, Any]:
        return {"operation": "Extremes", "count": self.count, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Extremes:
        return cls(fields["count"], tuple(fields["shape"]))


@dataclasses.dataclass(frozen=True)
class Config:
    pass


class Fold(Kernel[Extremes]):
    name, config_type = "fold", Config

    def runs_on(self, device: Device) -> bool:
        return not device.is_cpu

    def supports(self, op: Extremes, device: Device) -> list[str]:
        return [] if self.runs_on(device) else ["it needs a GPU"]

    def layout_reason(self, layout: Layout) -> str | None:
        return layout.unaligned

    def legal(self, config: Config, op: Extremes, device: Device) -> str | None:
        return None

    def candidates(self, op: Extremes, device: Device) -> list[Config]:
        return [Config()]

    def cost(self, config: Config, op: Extremes, device: Device) -> float:
        return 1e-6

    def tuning_shapes(self, op: Extremes) -> tuple[Extremes, ...]:
        return (op,)

    def lower(self, op: Extremes, config: Config, device: Device) -> Program:
        reads = tuple(Field(f"x{i}", "StridedTensor", View(each.name)) for i, each in enumerate(op.inputs))
        scratch = (Field("scratch", "float*", Scratch("partial")),)
        writes = (Field("least", "StridedOutput", View("least")), Field("largest", "Number*", Pointer("largest")))
        source = Source("fold.cu", "", (), device.arch)
        launches = (Launch("first", source, (*reads, *scratch), {}, 1), Launch("second", source, (*scratch, *writes), {}, 1))
        return Program(launches, (Buffer("partial", 1000),))


class FoldOnCpu(Fold):
    name, alignment = "cpu", 1

    def runs_on(self, device: Device) -> bool:
        return device.is_cpu

    def run(self, op: Extremes, config: Config, least: Any, largest: Any, **parts: Any) -> None:
        least[...], largest[...] = (fold(list(parts.values()), axis=0) for fold in (np.min, np.max))


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select.KERNELS_OF, Extremes, (Fold(), FoldOnCpu()))
    monkeypatch.setitem(OPERATIONS, "Extremes", Extremes)


def extremes(*parts: Any, out: Any = None) -> Any:
    return calls.run(parts, request.request_for(Extremes, {}, ()), out)


def test_on_the_cpu() -> None:
    for count in (1, 2, 5):
        parts = [np.random.default_rng(i).standard_normal((2, 3, 4, 8), np.float32) for i in range(count)]
        least, largest = extremes(*parts)
        assert (least == np.min(parts, 0)).all() and (largest == np.max(parts, 0)).all()
        for given in (np.empty_like(least), (None, np.empty_like(least)), (np.empty_like(least), np.empty_like(least))):
            found = extremes(*parts, out=given)
            assert (found[0] == least).all() and (found[1] == largest).all()
            for x, y in zip(given if isinstance(given, tuple) else (given,), found, strict=False):
                assert x is None or x is y


def test_launches() -> None:
    """Each array's address is where it belongs, in cold and in warm calls, as are the outputs' and the scratch memory's."""
    parts = [torch.randn(2, 3, 4, 8) for _ in range(3)]
    least, largest = torch.empty(2, 3, 4, 8), torch.empty(2, 3, 4, 8)
    for out in ((least, largest), (least, largest), (None, largest), (least, None), least, None):
        found = extremes(*parts, out=out)
        (first, _), (second, _) = LAUNCHED[-2:]
        views = [struct.unpack_from("<4q", first, 32 * i) for i in range(3)]
        assert views == [(x.data_ptr(), 4 * 96, 4 * 32, 4 * 8) for x in parts]
        partial = struct.unpack_from("<Q", first, 96)[0]
        assert struct.unpack_from("<Q4qQ", second) == (partial, found[0].data_ptr(), 384, 128, 32, found[1].data_ptr())
        for x, y in zip(out if isinstance(out, tuple) else (out, None), found, strict=True):
            assert x is None or x is y
    extremes(*parts[:2])
    assert len(LAUNCHED) == 14 and len(keys_kept("torch")) == 2, "another number of arrays is another operation"


OUT = torch.empty(2, 3, 4, 8)
WRONG: dict[str, tuple[Any, str]] = {
    "number": ((OUT,), "out has 1 arrays; it must have one for each of least, largest, None for one to be made"),
    "shape": ((None, OUT[:1]), r"out \(largest\) is a torch fp32 array of shape \(1, 3, 4, 8\)"),
    "both one": ((OUT, OUT), r"out \(largest\) overlaps out \(least\) in memory"),
    "strides": ((None, OUT.new_empty(2, 4, 3, 8).transpose(1, 2)), r"out \(largest\) has strides .* contiguous"),
}


@pytest.mark.parametrize("out, message", WRONG.values(), ids=WRONG)
def test_wrong_outputs(out: Any, message: str) -> None:
    parts = [torch.randn(2, 3, 4, 8) for _ in range(2)]
    for _ in range(2):
        extremes(*parts)
        with pytest.raises(ProblemError, match=message):
            extremes(*parts, out=out)
    with pytest.raises(ProblemError, match=r"out \(largest\) overlaps parts\[1\]"):
        extremes(*parts, out=(None, parts[1]))


def test_plan() -> None:
    parts = [torch.randn(2, 3, 4, 8) for _ in range(2)]
    found = {f"parts[{i}]": reading.read(x, "x") for i, x in enumerate(parts)}
    plan = calls.call_on(request.request_for(Extremes, {}, ()), found).plan
    plan.run(*parts), plan.run(**{"parts[1]": parts[1], "parts[0]": parts[0]})
    assert LAUNCHED[0][0][:64] == LAUNCHED[2][0][:64]
    for given, message in (((*parts, parts[0]), r"parts\[2\] was given"), (parts[:1], r"parts\[1\] is missing")):
        with pytest.raises(ProblemError, match=message):
            plan.run(*given)
    with pytest.raises(ProblemError, match="parts is empty"):
        extremes()
    assert from_json(plan.op.to_json()) == plan.op and isinstance(plan, Plan)
    assert "Extremes" in str(explain.explain_operation(plan.op, plan.device))


# ---- the backward


def gradients(length: int = 80, sinks: bool = False) -> dict[str, Any]:
    """Makes what the backward reads."""
    made = {name: torch.randn(2, length, 4, 64).bfloat16() for name in ("do", "q", "k", "v", "o")}
    return {**made, "lse": torch.randn(2, 4, length), **({"sinks": torch.randn(4)} if sinks else {})}


@pytest.mark.parametrize("sinks", [False, True])
def test_the_backward_is_the_same_cold_and_warm(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same launches for the same addresses, whether the call, its plan or its family was met before."""
    memory = torch.empty(1 << 23, dtype=torch.uint8)
    monkeypatch.setattr(making, "scratch_maker", lambda like, size: lambda beside: memory[:size])
    given = []
    for length in (80, 80, 79, 78):
        call = gradients(length, sinks)
        given.append({**call, "out": tuple(torch.empty_like(call[name]) for name in ("q", "k", "v", "sinks")[: 3 + sinks])})
    plan = rawattn.plan_backward(**{name: x for name, x in given[0].items() if name != "out"})
    names = ["attn_bwd_delta", "attn_bwd", "attn_bwd_dsinks"][: 2 + sinks]
    assert plan.program is not None and [launch.entry for launch in plan.program.launches] == names

    def launched(run: Any, call: dict[str, Any]) -> list[tuple[bytes, int]]:
        LAUNCHED.clear()
        found = run(**call)
        assert all(x is y for x, y in zip(found, call["out"], strict=True)) and len(LAUNCHED) == len(names)
        return list(LAUNCHED)

    cold = []
    for call in given:
        forget()
        cold.append(launched(rawattn.attention_backward, call))
    assert len({args for launches in cold for args, _ in launches}) == len(given) * len(names)
    forget()
    for _ in range(2):
        assert [launched(rawattn.attention_backward, call) for call in given] == cold
    assert launched(plan.run, given[0]) == launched(plan.run, given[0]) == cold[0]
    assert len(keys_kept("torch")) == (1 if not sinks else 3), "a new length of the family makes no plan of its own"


def test_what_the_backward_writes() -> None:
    """Without ``out`` each gradient is new, in the shape and dtype of its array."""
    call = gradients(sinks=True)
    found = rawattn.attention_backward(**call)
    for x, name in zip(found, ("q", "k", "v", "sinks"), strict=True):
        assert (x.shape, x.dtype) == (call[name].shape, call[name].dtype)
    (kept,) = calls_kept()
    dq = next(field for field in kept.plan.program.launches[1].fields if field.name == "dq")
    at = render.layout(kept.plan.program.launches[1].fields).offsets[dq.name]
    args = [args for args, _ in LAUNCHED[-3:]]
    assert struct.unpack_from("<4q", args[1], at) == (found[0].data_ptr(), 80 * 4 * 128, 4 * 128, 128)


WRONG_GRADIENTS: dict[str, Any] = {
    "do is not aligned": lambda x: {"do": torch.zeros(2 * 80 * 4 * 64 + 1).bfloat16()[1:].view(2, 80, 4, 64)},
    "rows of do": lambda x: {"do": torch.zeros(2, 80, 4, 65).bfloat16()[..., :64]},
    "columns of o": lambda x: {"o": torch.zeros(2, 80, 4, 72).bfloat16()},
    "heads of do": lambda x: {"do": torch.zeros(2, 80, 8, 64).bfloat16()},
    "dtype of o": lambda x: {"o": x["o"].half()},
    "dtype of lse": lambda x: {"lse": x["lse"].double()},
    "shape of lse": lambda x: {"lse": torch.zeros(2, 80, 4)},
    "strides of lse": lambda x: {"lse": torch.zeros(2, 80, 4).transpose(1, 2)},
    "no lse": lambda x: {"lse": None},
    "length of k": lambda x: {"k": torch.zeros(2, 79, 4, 64).bfloat16()},
    "v requires grad": lambda x: {"v": x["v"].detach().requires_grad_()},
}


@pytest.mark.parametrize("wrong", WRONG_GRADIENTS.values(), ids=WRONG_GRADIENTS)
def test_what_is_wrong_is_wrong_when_warm(wrong: Any) -> None:
    """A call's family is met, and its neighbours are; what is wrong with it is said all the same."""
    good = gradients()
    (
        rawattn.attention_backward(**good),
        rawattn.attention_backward(**gradients(79)),
        rawattn.attention_backward(**gradients()),
    )
    launched = len(LAUNCHED)
    for _ in range(2):
        with pytest.raises((ProblemError, UnsupportedError)):
            rawattn.attention_backward(**good | wrong(good))
    assert len(LAUNCHED) == launched
