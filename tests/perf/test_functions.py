"""The benchmark's Python functions, without a GPU: what they keep, and every contender on them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

import rawattn
from perf.lib import backward, benchmark, checking, functions, ours, peers, report, sets
from perf.lib.task import Task, Unserved
from rawattn.command import timing
from rawattn.driver.device import TYPICAL
from rawattn.operation import Backward
from rawattn.variant.mask import Causal

torch = pytest.importorskip("torch")

BASE = {"batch": 2, "q_len": 256, "kv_len": 256, "heads": 2, "kv_heads": 2, "head_dim": 16, "head_dim_v": 16}
CASES = {name: sets.FunctionCase(function=name, **BASE) for name in functions.FUNCTIONS}


@pytest.fixture(autouse=True)
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("WINDOW", 50), ("DOCUMENT", 40), ("NEIGHBOURS", 5), ("REACH", 9)):
        monkeypatch.setattr(functions, name, size)
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda each: each))
    functions.document_lengths.cache_clear()


@pytest.mark.parametrize("name", functions.MASKS)
def test_pairs_are_counted(name: str) -> None:
    case = CASES[name]
    b, h, q, kv = torch.meshgrid(*(torch.arange(n) for n in (2, 2, 256, 256)), indexing="ij")
    kept = functions.mask_mod(functions.FUNCTIONS[name].make(case, "cpu"))(b, h, q, kv).expand(b.shape)
    assert functions.FUNCTIONS[name].pairs(case) == int(kept.sum()) < kept.numel()
    assert sets.flops(case) == 64 * int(kept.sum())
    own = functions.FUNCTIONS[name]
    assert bool((kept != kept[:1]).any()) <= own.by_batch and bool((kept != kept[:, :1]).any()) <= own.by_head


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_every_contender_computes_it(name: str) -> None:
    case = CASES[name]
    task, found = Task.make(case, device="cpu"), peers.installed(names="flex")
    check, names = checking.Check(task), ["ours", *benchmark.rivals(case, found)]
    assert "flex" in names and ("built_in" in names) == (case.built_in is not None)
    for each in names:
        call = peers.prepare(each, task, found)
        assert call.checked == (each != "built_in" or name in functions.MASKS)
        assert call.view(call.run()).shape == task.q.shape
        if call.checked:
            assert check(call) < 5e-3
        assert (call.before is not None) == (each == "flex" and name in functions.MASKS)
    assert ours.our_plan(task, "ours")().shape == task.q.shape


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_what_is_compiled_ahead_is_what_runs(name: str) -> None:
    task = Task.make(CASES[name], device="cpu")
    op, found = rawattn.explain(task.q, task.k, task.v, **task.functions).op, sets.operation(CASES[name])
    assert op == dataclasses.replace(found, layout=op.layout), "but for what a GPU asks"
    assert (found.layout.tma_captured != ()) == (name in ("pair_bias", "triangle16"))
    assert hasattr(getattr(op, functions.FUNCTIONS[name].role), "code"), "a function, and not what it was recognised as"


def plain_flex(task: Task) -> timing.Call:
    """FlexAttention's forward, whose backward torch does not have on the CPU."""
    q, k, v = task.heads_first
    at = torch.meshgrid(*(torch.arange(n) for n in (*q.shape[:3], k.shape[2])), indexing="ij")

    def run() -> Any:
        s = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
        s = task.functions["score"](s, *at) if "score" in task.functions else s.where(task.functions["mask"](*at), -torch.inf)
        return (s.softmax(-1) @ v.float()).to(q.dtype)

    return timing.Call(run, before=print if "mask" in task.functions else None)


@pytest.mark.parametrize("name", ["documents+causal", "blocks", "alibi", "pair_bias", "t5_table"])
def test_gradients_of_every_contender(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of what a score captured, which are the same of both; for kernels that were compiled ahead."""
    monkeypatch.setattr(peers, "flex", plain_flex)
    (case,) = sets.backward([dataclasses.replace(CASES[name], batch=1)])
    task, found = Task.make(case, device="cpu"), peers.installed(names="flex")
    check, names = backward.Check(task), ["ours", *benchmark.rivals(case, found)]
    assert "flex" in names and ("built_in" in names) == (case.built_in is not None)
    captured = []
    for each in names:
        call = backward.prepare(each, task)
        grads = call.view(call.run())
        assert [x.shape for x in grads[:3]] == [x.shape for x in (task.q, task.k, task.v)]
        assert (call.before is not None) == (each == "flex" and name in functions.MASKS)
        if call.checked:
            assert check(call) < backward.TOLERANCE["bf16"]
            captured.append(grads[3:])
    assert {len(each) for each in captured} == {int(name in functions.SCORES)} and len(captured) >= 2
    for mine, theirs in zip(captured[0], captured[-1], strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 2e-2
    op = sets.operation(case)
    assert isinstance(op, Backward) and op.wrt == ("score_0",) * (name in functions.SCORES)
    assert sets.from_json(json.loads(json.dumps(sets.to_json(case)))) == case and sets.label(case).endswith(f"f:{name} bwd")
    assert 2 * sets.flops(case) == 5 * sets.flops(dataclasses.replace(CASES[name], batch=1))


def test_a_wrong_gradient_of_what_was_captured_is_seen() -> None:
    (case,) = sets.backward([dataclasses.replace(CASES["alibi"], batch=1)])
    task = Task.make(case, device="cpu")
    grads = backward.prepare("ours", task).run()
    with pytest.raises(ArithmeticError):
        backward.Check(task)(timing.Call(lambda: (*grads[:3], grads[3] * float("nan"))))


def test_a_wrong_function_is_seen() -> None:
    task = Task.make(CASES["documents+causal"], device="cpu")
    other = dataclasses.replace(task, case=sets.dense(2, 256, 2, 16, True))
    with pytest.raises(ArithmeticError):
        checking.Check(task)(peers.prepare("ours", other, {}))


def test_others_refuse_functions() -> None:
    task = Task.make(CASES["alibi"], device="cpu")
    for name in ("cudnn", "fa2", "efficient"):
        with pytest.raises(Unserved, match="no function"):
            peers.PEERS[name][1](task)
    plain = Task.make(sets.dense(1, 64, 2, 16, False), device="cpu")
    with pytest.raises(Unserved, match="nothing built-in"):
        ours.built_in(plain)
    assert benchmark.rivals(CASES["blocks"], {}) == [] and benchmark.rivals(plain.case, {"fa2": print}) == ["fa2"]  # type: ignore[dict-item]


def test_cases_as_text_and_built_in() -> None:
    for case in CASES.values():
        assert sets.from_json(json.loads(json.dumps(sets.to_json(case)))) == case
    assert sets.label(CASES["causal"]) == "2x256 h2 d16 f:causal"
    packed = CASES["documents+sliding"].built_in
    assert packed is not None and packed.causal and sum(q for q, _ in packed.lengths or ()) == 2 * 256
    assert CASES["causal"].built_in is not None and CASES["causal"].built_in.op.spec.mask == Causal()


def test_what_is_made_before_is_reported() -> None:
    def timed(name: str, us: float) -> report.Timing:
        found = report.Timing(name, before_us=25.0 if name == "flex" else float("nan"))
        found.take([[us] * 3] * 5, 10**9, 1000)
        return found

    result = report.Result("a", sets.to_json(CASES["causal"]), 10**9, 1000, "events")
    result.timings += [timed("ours", 100.0), timed("built_in", 80.0), timed("flex", 150.0)]
    result.compare()
    assert result.ratio() == result.ratio("flex") == pytest.approx(1.5) and result.ratio("built_in") == pytest.approx(0.8)
    run = report.Run({}, {"set": "functions"}, {"matmul_tflops": 800.0}, [result])
    assert run.before()[1:] == [["a", "flex", "150.0", "25.0", "175.0"]] and "| 175.0 |" in run.markdown()
    assert report.Run({}, {}).before() == []


def test_all_that_a_set_runs_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []

    class Pool:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...
        def submit(self, sources: Any) -> int:
            submitted.extend(sources)
            raise InterruptedError

    monkeypatch.setattr(benchmark, "Pool", Pool)
    monkeypatch.setattr(ours, "select", lambda op, *_: type("S", (), {"kernel": op, "config": None}))
    monkeypatch.setattr(ours, "launched", lambda kernel, op, config, device: [op])
    with pytest.raises(InterruptedError):
        cases = [(name, CASES[name]) for name in ("causal", "blocks")]
        benchmark.measure(benchmark.Settings(), TYPICAL["sm_90a"], cases, report.Run({}, {}), print, None)  # type: ignore[arg-type]
    assert [op.spec.mask for op in submitted[2:]] == [Causal()] and len(submitted) == 3
    assert timing.Call(print).before is None
