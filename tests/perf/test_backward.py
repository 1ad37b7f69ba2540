"""Cases whose gradients are timed: what they are, what is compiled for them, and which wrong gradients are seen."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from collections.abc import Callable
from typing import Any

import pytest

import rawattn
from perf import bench, gate
from perf.lib import backward, expected, ours, report, sets
from perf.lib.checking import failure
from perf.lib.sets import BackwardCase
from perf.lib.task import Task, Unserved
from rawattn.command.timing import Call
from rawattn.driver.device import TYPICAL
from rawattn.operation import Backward, Forward
from rawattn.testing import Case

torch = pytest.importorskip("torch")

SMALL = sets.dense(2, 70, 4, 16, True, kv_heads=2)
PACKED = dataclasses.replace(sets.packed(3, 64, tokens=90), heads=2, kv_heads=2, head_dim=16, head_dim_v=16)
CASES = {
    "bf16": SMALL,
    "fp16, window": dataclasses.replace(SMALL, dtype="fp16", window=(20, 0)),
    "fp32, softcap": dataclasses.replace(SMALL, dtype="fp32", softcap=3.0),
    "more keys": dataclasses.replace(SMALL, kv_len=90, head_dim_v=8),
    "varlen": PACKED,
}


def task_of(case: Case) -> Task:
    (case,) = sets.backward([case])
    return Task.make(case, device="cpu")


# ---- cases and sets


@pytest.mark.parametrize("case", [*CASES.values(), *sets.SETS["paper"]], ids=sets.label)
def test_a_backward_case(case: Case) -> None:
    (made,) = sets.backward([case])
    assert type(made) is BackwardCase and made != case and sets.is_backward(made) and not sets.is_backward(case)
    assert sets.label(made) == f"{sets.label(case)} bwd"
    fields = json.loads(json.dumps(sets.to_json(made)))
    assert fields["backward"] is True and sets.from_json(fields) == made and type(sets.from_json(fields)) is BackwardCase
    assert type(sets.from_json({k: v for k, v in fields.items() if k != "backward"})) is Case
    op, forward = sets.operation(made), sets.operation(case)
    assert type(op) is Backward and type(forward) is Forward and op.forward == forward
    if case.lengths is None:
        assert sets.flops(made) == op.flops and sets.flops(case) == forward.flops
    if case.head_dim == case.head_dim_v:
        assert 2 * sets.flops(made) == 5 * sets.flops(case)


def test_flops_of_unequal_head_sizes() -> None:
    """S, dQ and dK have 192 columns, dP and dV 128."""
    case = sets.dense(3, 10, 2, 192, False, head_dim_v=128)
    assert sets.flops(sets.backward([case])[0]) == 2 * (3 * 192 + 2 * 128) * 3 * 2 * 100


def test_sets() -> None:
    assert sets.SETS["paper-bwd"] == sets.backward(sets.SETS["paper"]) and len(sets.SETS["paper-bwd"]) == 36
    assert all(case.dtype == "fp32" for case in sets.SETS["fp32-bwd"])
    kinds = sets.SETS["kinds-bwd"]
    for name in ("paper-bwd", "kinds-bwd", "fp32-bwd"):
        assert all(map(sets.is_backward, sets.load(name, None)))
    assert any(case.lengths for case in kinds) and any(case.window for case in kinds) and any(case.softcap for case in kinds)
    assert any(case.kv_heads < case.heads for case in kinds) and any(case.head_dim != case.head_dim_v for case in kinds)
    assert sum(map(sets.is_backward, sets.SETS["gate"])) == 19


@pytest.mark.parametrize("kernel", [None, "attn_bwd_mma", "attn_bwd_simt"])
def test_what_is_compiled(kernel: str | None) -> None:
    """All launches of the backward, by the kernel that was asked for."""
    case = sets.SETS["paper-bwd"][0]
    options = bench.arguments().parse_args([] if kernel is None else ["--kernel", kernel])
    found = {source.name.removesuffix(".cu") for source in ours.sources({case: ["ours"]}, TYPICAL["sm_90a"], options.kernel)}
    wanted = {"attn_bwd_simt": {"attn_bwd_dkdv_simt", "attn_bwd_dq_simt"}}.get(str(kernel), {kernel or "attn_bwd"})
    assert found - {"attn_bwd_convert"} == {"attn_fwd", "attn_bwd_delta", *wanted}, "the forward keeps what gradients need"


# ---- the check


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_right_gradients_pass(case: Case) -> None:
    task = task_of(case)
    assert backward.Check(task)(backward.prepare("ours", task)) < backward.TOLERANCE[case.dtype] / 2


def changed(task: Task, change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Call:
    grads = backward.prepare("ours", task).run()
    return Call(lambda: change(*(x.clone() for x in grads)))


def one_row(dq: Any, dk: Any, dv: Any) -> Any:
    dk[-1, 40, -1] = 0
    return dq, dk, dv


def one_nan(dq: Any, dk: Any, dv: Any) -> Any:
    dv[0, 3, 0, 5] = torch.nan
    return dq, dk, dv


FAULTS: dict[str, Callable[..., Any]] = {
    "dq 3 % too large": lambda dq, dk, dv: (1.03 * dq, dk, dv),
    "dk without its scale": lambda dq, dk, dv: (dq, dk * 4, dv),
    "dv of another sign": lambda dq, dk, dv: (dq, dk, -dv),
    "dk and dv exchanged": lambda dq, dk, dv: (dq, dv, dk),
    "dq a row off": lambda dq, dk, dv: (dq.roll(1, 1), dk, dv),
    "a row of dk missing": one_row,
    "a NaN far from what is compared": one_nan,
}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_wrong_gradients_are_seen(fault: Callable[..., Any], dtype: str) -> None:
    task = task_of(dataclasses.replace(SMALL, dtype=dtype))
    with pytest.raises(ArithmeticError, match="relative error"):
        backward.Check(task)(changed(task, fault))


def test_delta_left_away_is_seen() -> None:
    """The fault of a kernel, not of its results: the gradients of another o."""
    task = task_of(SMALL)
    o, lse = rawattn.attention(task.q, task.k, task.v, causal=True, return_lse=True)
    inputs = backward.gradient(task), task.q, task.k, task.v, 0 * o, lse
    with pytest.raises(ArithmeticError):
        backward.Check(task)(Call(lambda: rawattn.attention_backward(*inputs, causal=True)))


# ---- peers


def test_torch_s_gradients() -> None:
    task = task_of(SMALL)
    assert 0 < backward.Check(task)(backward.sdpa("MATH", False, task)) < 8e-3
    assert not torch.are_deterministic_algorithms_enabled()
    with backward.sdpa("MATH", True, task).context():
        assert torch.are_deterministic_algorithms_enabled()
    for case, words in ((PACKED, "no lengths"), (CASES["fp16, window"], "no window"), (CASES["more keys"], "first key")):
        with pytest.raises(Unserved, match=words):
            backward.sdpa("MATH", False, task_of(case))
    assert backward.peers_among(["fa3", "cudnn", "math"]) == ["fa3", "fa3_det", "cudnn", "cudnn_det"]


@pytest.mark.parametrize("same_bits", [False, True])
@pytest.mark.parametrize("case", [SMALL, CASES["fp16, window"], PACKED], ids=sets.label)
def test_flash_attention_3(monkeypatch: pytest.MonkeyPatch, case: Case, same_bits: bool) -> None:
    """A library with its signatures computes by ours: it is given what it needs, and its gradients go into its outputs."""

    def options(more: dict[str, Any]) -> dict[str, Any]:
        left, right = more.get("window_size_left", -1), more.get("window_size_right", -1)
        packed = {"cu_seqlens_q": more.get("cu_seqlens_q"), "cu_seqlens_kv": more.get("cu_seqlens_k")}
        window = None if left == right == -1 else (left, right)
        return {"causal": more["is_causal"], "scale": more["softmax_scale"], "window": window, **packed}

    def fwd(q: Any, k: Any, v: Any, *, num_splits: int, **more: Any) -> Any:
        asked = options(more)
        starts = [asked.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        attention = rawattn.attention if starts[0] is None else functools.partial(rawattn.attention_varlen)
        return (*attention(q, k, v, *(x for x in starts if x is not None), **asked, return_lse=True), None)

    def bwd(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *grads: Any, deterministic: bool, **more: Any) -> None:
        assert deterministic is same_bits
        rawattn.attention_backward(do, q, k, v, o, lse, **options(more), out=grads)

    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)
    task = task_of(case)
    assert backward.Check(task)(backward.prepare("fa3_det" if same_bits else "fa3", task)) < 8e-3
    if same_bits:
        with pytest.raises(Unserved) as caught:
            backward.fa3(True, task_of(sets.dense(1, 8, 1, 256, True)))
        assert failure(caught.value) == "no deterministic mode at this head_dim"


def test_what_is_expected_of_flash_attention_4() -> None:
    """Its time is that of FlashAttention 3 in the run, by the rates that both had elsewhere, on the same shapes alone."""
    found = {}
    for case in sets.SETS["paper-bwd"]:
        result = report.Result(sets.label(case), sets.to_json(case), 1, 1, "events", ratios={"ours": {"fa3": (1.0, 0.9, 1.1)}})
        if (ratio := result.ratio(expected.FA4)) == ratio:
            found[result.label] = ratio
    assert len(found) == len(expected.RATES) and sum(ratio < 1 for ratio in found.values()) == 6
    assert found["4x4096 h16 d128 full bwd"] == pytest.approx(632 / 643)
    plain = sets.SETS["paper"][0]
    others = [plain, sets.backward([dataclasses.replace(sets.dense(4, 4096, 16, 128, True), window=(9, 0))])[0]]
    assert [expected.fa4_over_fa3(case) for case in others] == [None, None]
    run = report.Run({}, {}, results=[result])
    assert run.columns == run.peers, "the last one has no expectation"


def test_kinds_of_the_gate() -> None:
    """Each is served, by the kernel that it names, beside peers of its number format."""
    device = TYPICAL["sm_90a"]
    for case in sets.GATE_KINDS:
        made = [source.name for source in ours.sources({case: ["ours"]}, device)]
        assert made and getattr(case, "kernel", "") in (*(name.removesuffix(".cu") for name in made), "")
        assert sets.from_json(sets.to_json(case)) == case
    peers = dict.fromkeys(("cudnn", "fa2", "efficient"), lambda task: None)
    fp32, plain = (next(c for c in sets.GATE_KINDS if c.dtype == dtype) for dtype in ("fp32", "fp16"))
    assert gate.rivals(fp32, peers) == ["efficient"] and gate.rivals(plain, peers) == ["cudnn", "fa2"]
    timed = [case for case in sets.GATE_KINDS if isinstance(case, sets.ConstantTimeCase)]
    assert [sets.operation(case).constant_time for case in timed] == [True]
    assert ours.our_options(timed[0], "ours")["constant_time"]
