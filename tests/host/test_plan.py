"""What a plan keeps from call to call, without a GPU: torch tensors on the CPU stand for those on one, and a launch is written
down instead of issued. A call on a warm plan must launch what it would launch on a cold one, or raise as it would there."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import rawattn
from rawattn import api, arrays, compiler, driver, plans, render
from rawattn.device import TYPICAL
from rawattn.errors import ProblemError

torch = pytest.importorskip("torch")

GPU = dataclasses.replace(TYPICAL["sm_90a"], index=-1)  # of torch's tensors on the CPU
LAUNCHED: list[tuple[bytes, int]] = []  # arguments and stream
STATE = {"stream": 0, "capturing": False}


class Launch:
    def __init__(self, function: Any, grid: int, args: bytes, stream: int) -> None:
        self.said = args, stream

    def __call__(self) -> None:
        LAUNCHED.append(self.said)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    counters = types.SimpleNamespace(take=lambda stream_id, captured: 1 << 20 | stream_id + captured)
    for owner, name, value in (
        (arrays, "CPU", -2),
        (compiler, "compile_together", lambda *_: None),
        (driver, "counters", lambda index: counters),
        (driver, "current", lambda index: contextlib.nullcontext()),
        (driver, "device", lambda index: GPU),
        (driver, "Launch", Launch),
        (driver, "stream_state", lambda stream, index: (stream, STATE["capturing"])),
        (driver, "tensor_map", lambda *args: repr(args).encode().ljust(128)[-128:]),
        (plans, "_load", lambda launch, op, *_: plans._Loaded.of(None, None, launch, op)),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STATE["stream"], raising=False)
    STATE.update(stream=0, capturing=False)
    LAUNCHED.clear()
    forget()
    yield
    forget()


def forget() -> None:
    for cache in (api._plans, api._calls):
        cache.clear()


def tensors(length: int = 40, heads: int = 4) -> dict[str, Any]:
    return {name: torch.randn(2, length, heads, 64).bfloat16() for name in "qkv"}


def variations() -> dict[str, dict[str, Any]]:
    """Calls that differ in one thing each, of shapes that a plan takes."""
    good = tensors()
    other, padded = tensors(), torch.randn(2, 40, 4, 72).bfloat16()[..., :64]
    found = {
        "good": good,
        "out": good | {"out": torch.empty_like(good["q"])},
        "padded out": good | {"out": torch.empty_like(padded)},
    }
    found |= {name: good | {name: other[name]} for name in "qkv"}
    found |= {f"padded {name}": good | {name: padded} for name in "qkv"}
    return found | {"heads first": good | {"q": torch.randn(2, 4, 40, 64).bfloat16().transpose(1, 2)}}


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_warm_call_launches_what_a_cold_one_does(return_lse: bool) -> None:
    given = [{**call, "out": call.get("out", torch.empty(2, 40, 4, 64).bfloat16())} for call in variations().values()]
    calls = [(call, stream) for call in given for stream in (0, 7)]
    plan, cold, warm = rawattn.plan(**tensors(), return_lse=return_lse), [], []

    def lse_apart(said: tuple[bytes, int]) -> tuple[bytes, int]:
        """Without the address of lse, which is new at every call."""
        args, stream = bytearray(said[0]), said[1]
        if return_lse:
            at = plan._loaded[0].layout.offsets["lse"]
            args[at : at + 8] = bytes(8)
        return bytes(args), stream

    for call, stream in calls:
        forget()
        STATE["stream"] = stream
        rawattn.attention(**call, return_lse=return_lse)
        cold.append(lse_apart(LAUNCHED.pop()))
    assert len(set(cold)) == len(calls)
    for (call, stream), run in itertools.product(calls * 2, (rawattn.attention, plan.run)):
        STATE["stream"] = stream
        run(**call, **({"return_lse": return_lse} if run is rawattn.attention else {}))
        warm.append(lse_apart(LAUNCHED.pop()))
    assert warm == [said for said in cold * 2 for _ in range(2)]


def test_a_launch_is_kept_for_each_output_and_stream() -> None:
    call = variations()["out"]
    rawattn.attention(**call)
    (call_kept,) = api._calls.values()
    for _ in range(3):
        rawattn.attention(**call)
    STATE["stream"] = 7
    rawattn.attention(**call)
    assert len(call_kept._launches) == 2 and len(LAUNCHED) == 5
    for _ in range(3 * plans.KEPT_LAUNCHES):
        rawattn.attention(**call | {"out": torch.empty_like(call["q"])})
        assert len(call_kept._launches) <= plans.KEPT_LAUNCHES


def test_a_captured_launch_is_not_kept() -> None:
    call = variations()["out"]
    STATE.update(stream=7, capturing=True)
    rawattn.attention(**call)
    (call_kept,) = api._calls.values()
    assert not call_kept._launches
    STATE["capturing"] = False
    rawattn.attention(**call)
    STATE["capturing"] = True
    rawattn.attention(**call)
    captured, eager, again = LAUNCHED
    assert captured == again != eager, "a graph counts where no eager launch does"


def test_no_memory_is_kept_alive() -> None:
    call = variations()["out"]
    plan = rawattn.plan(call["q"], call["k"], call["v"])
    rawattn.attention(**call)
    plan.run(**call)
    watched = [weakref.ref(x.untyped_storage()) for x in call.values()] + [weakref.ref(x) for x in call.values()]
    call.clear()
    gc.collect()
    assert not any(each() is not None for each in watched)


WRONG: dict[str, Any] = {
    "k of another dtype": lambda x: {"k": x["k"].half()},
    "k of another length": lambda x: {"k": torch.cat([x["k"]] * 2, 1)},
    "v of another batch": lambda x: {"v": x["v"][:1]},
    "strided columns": lambda x: {"q": torch.randn(2, 40, 4, 128).bfloat16()[..., ::2]},
    "q requires grad": lambda x: {"q": x["q"].detach().requires_grad_()},
    "out requires grad": lambda x: {"out": torch.empty_like(x["q"]).requires_grad_()},
    "out is q": lambda x: {"out": x["q"]},
    "out of another shape": lambda x: {"out": torch.empty_like(x["q"][:1])},
    "out of another dtype": lambda x: {"out": torch.empty_like(x["q"], dtype=torch.float16)},
    "a row stride that is no multiple of 16 bytes": lambda x: {"k": torch.randn(2, 40, 4, 65).bfloat16()[..., :64]},
    "sparse": lambda x: {"v": x["v"].to_sparse()},
    "meta": lambda x: {"v": x["v"].to("meta")},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_wrong_when_warm(wrong: Any) -> None:
    good = tensors()
    plan = rawattn.plan(**good)
    for _ in range(2):
        rawattn.attention(**good), plan.run(**good)
        for run in (rawattn.attention, plan.run):
            with pytest.raises((ProblemError, rawattn.UnsupportedError)):
                run(**good | wrong(good))


def test_requiring_grad_is_allowed_at_times() -> None:
    """A tensor is kept neither as one that may be taken nor as one that may not."""
    good = tensors()
    good["q"].requires_grad_()
    plan = rawattn.plan(**{name: x.detach() for name, x in good.items()})
    for run, _ in itertools.product((rawattn.attention, plan.run), range(2)):
        with torch.no_grad():
            run(**good)
        with pytest.raises(ProblemError, match="requires grad"):
            run(**good)


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": 1}),
    ({"causal": False}, {"causal": 0}),
    ({"return_lse": False}, {"return_lse": 0}),
    ({"constant_time": True}, {"constant_time": 1.0}),
    ({"window": (1, 0)}, {"window": (1.0, 0)}),
    ({"window": (1, 0)}, {"window": (True, 0)}),
    ({"window": (0, 1)}, {"window": {0, 1}}),
]


@pytest.mark.parametrize("good, wrong", EQUAL, ids=str)
def test_what_equals_a_right_option_may_be_wrong(good: dict[str, Any], wrong: dict[str, Any]) -> None:
    call = tensors()
    rawattn.attention(**call, **good)
    for run in (rawattn.attention, rawattn.plan, rawattn.explain):
        with pytest.raises(ProblemError):
            run(**call, **wrong)


def test_lengths_of_another_type() -> None:
    q = torch.randn(40, 4, 64).bfloat16()
    starts = torch.tensor([0, 40], dtype=torch.int32)
    rawattn.attention_varlen(q, q, q, starts, starts, 1, 1)
    with pytest.raises(ProblemError, match="max_seqlen_q is True"):
        rawattn.attention_varlen(q, q, q, starts, starts, True, 1)


def test_a_window_may_be_a_list() -> None:
    call = tensors()
    for window in ((3, 0), [3, 0]):
        rawattn.attention(**call, window=window)
    assert len(api._plans) == 1 and rawattn.plan(**call, window=[3, 0]) is rawattn.plan(**call, window=(3, 0))


def test_constant_time_is_a_plan_of_its_own() -> None:
    call = tensors()
    steady, plain = rawattn.plan(**call, constant_time=True), rawattn.plan(**call)
    assert steady is not plain and (steady.op.constant_time, plain.op.constant_time) == (True, False)
    assert "constant_time" in repr(steady) and "constant_time" not in repr(plain)
