"""``rawattn.attention_backward`` without a GPU: on the CPU against the reference, what it refuses, what it copies, what is
selected for it on which GPU, and what the programs of its kernels hold."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn.array import making
from rawattn.cpu.backward import run_backward
from rawattn.driver.device import TYPICAL, Device
from rawattn.driver.device import cpu as this_cpu
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.kernel import attn_bwd, attn_bwd_mma, attn_bwd_pair, attn_bwd_simt, backward, render
from rawattn.kernel.attn_bwd import ATTN_BWD
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_bwd_pair import ATTN_BWD_PAIR
from rawattn.kernel.attn_bwd_simt import ATTN_BWD_SIMT
from rawattn.kernel.program import Buffer
from rawattn.operation import Backward, Forward, from_json
from rawattn.operation.operand import Layout
from rawattn.runtime import record
from rawattn.runtime.select import select
from rawattn.testing import Case, cases, expect_backward
from rawattn.variant.element import FP32, FP64
from rawattn.variant.field import Counter, Scratch, Value, Violations
from rawattn.variant.mask import Causal, Full, Window
from rawattn.variant.scheduler import DIRECTIONS
from rawattn.variant.score import Scale, Softcap
from tests import lists, operations
from tests.operations import replace
from tests.threads import at_once

torch = pytest.importorskip("torch")
H200 = TYPICAL["sm_90a"]


# ---- on the CPU


def call(case: Case, library: str = "numpy", dlse: bool = True, **options: Any) -> tuple[Any, ...]:
    """The gradients of a case, from o and lse of the library itself."""
    q, k, v, *starts = case.inputs(library, "cpu")
    do, dlse_given = case.output_gradients(library, "cpu")
    found = {**case.options, **({"sinks": case.sink_logits(library, "cpu")} if case.sinks else {})}
    forward = rawattn.attention_varlen if starts else rawattn.attention
    o, lse = forward(q, k, v, *starts, **found, return_lse=True)
    options |= {"dlse": dlse_given} if dlse else {}
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=False))
    return rawattn.attention_backward(do, q, k, v, o, lse, **found, **options)


def check(case: Case, library: str = "numpy", dlse: bool = True) -> None:
    inputs, (do, dlse_given) = case.inputs(), case.output_gradients()
    expected = expect_backward(do, *inputs, dlse=dlse_given if dlse else None, **case.options)
    expected.check(*call(case, library, dlse))


@settings(max_examples=40, deadline=None)
@given(cases(longest=100, head_dims=(1, 8, 17, 64), sinks=None), st.booleans())
def test_numpy(case: Case, dlse: bool) -> None:
    """The same bits as ``run_backward``, which has tests of its own, for everything that a call may have."""
    q, k, v, *starts = case.inputs()
    (do, dlse_given), op = case.output_gradients(), case.op
    packed = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=False))
    o, lse = (rawattn.attention_varlen if starts else rawattn.attention)(q, k, v, **packed, **case.options, return_lse=True)
    given = {**packed, **({"dlse": dlse_given} if dlse else {}), **({"sinks": case.sink_logits()} if case.sinks else {})}
    found = rawattn.attention_backward(do, q, k, v, o, lse, **case.options | given)
    wanted = [np.full(x.shape, np.nan, x.dtype) for x in (q, k, v, *[given.get("sinks")] * case.sinks)]
    gradients = dict(zip(("dq", "dk", "dv", "dsinks"), wanted, strict=False))
    options = {"mask": op.spec.placed_mask, "score": op.spec.placed_score, "scale": op.scale}
    run_backward(do, q, k, v, o, lse, **options, **given, **gradients)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]


@pytest.mark.parametrize(
    "case",
    [
        Case(q_len=100, kv_len=130, heads=4, kv_heads=2, causal=True, layout="packed"),
        Case(dtype="fp32", q_len=100, kv_len=50, causal=True, sinks=True),
        Case(lengths=((5, 90), (0, 40), (70, 0)), window=(20, 3), sinks=True, heads=2),
        *(Case(sinks=True, **{name: 0}) for name in ("batch", "q_len", "kv_len")),
    ],
    ids=lambda case: case.name,
)
def test_torch(case: Case) -> None:
    check(case, "torch")


def tensors(library: str = "numpy", **options: Any) -> dict[str, Any]:
    """do, q, k, v, o and lse that belong together."""
    case = Case(dtype="fp32", batch=2, q_len=40, kv_len=40, heads=4, kv_heads=2, head_dim_v=32)
    q, k, v = case.inputs(library, "cpu")
    o, lse = rawattn.attention(q, k, v, return_lse=True, **options)
    return {"do": case.output_gradients(library, "cpu")[0], "q": q, "k": k, "v": v, "o": o, "lse": lse}


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a, b, strict=True))


def test_outputs_of_the_caller() -> None:
    good = tensors()
    wanted = rawattn.attention_backward(**good)
    out = tuple(np.full_like(good[name], np.nan) for name in "qkv")
    found = rawattn.attention_backward(**good, out=out)
    assert all(x is y for x, y in zip(found, out, strict=True)) and same(found, wanted)
    found = rawattn.attention_backward(**good, out=(None, out[1], None))
    assert found[1] is out[1] and found[0] is not out[0] and same(found, wanted)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_gradients_that_are_copied(library: str) -> None:
    """do, whose last dimension is not contiguous or which is expanded, and dlse that is not contiguous; nothing else."""
    good, module = tensors(library), {"numpy": np, "torch": torch}[library]
    one, lse_one = module.ones((), dtype=good["do"].dtype), module.ones((), dtype=good["lse"].dtype)
    swapped = module.swapaxes(good["do"], 1, 3)
    columns_first = swapped.copy() if library == "numpy" else swapped.contiguous()
    odd = {
        "expanded": module.broadcast_to(one, good["do"].shape),
        "expanded rows": module.broadcast_to(good["do"][:, :1], good["do"].shape),
        "columns first": module.swapaxes(columns_first, 1, 3),
    }
    for name, do in odd.items():
        whole = np.ascontiguousarray(do) if library == "numpy" else do.contiguous()
        call = good | {"do": do}
        assert same(rawattn.attention_backward(**call), rawattn.attention_backward(**good | {"do": whole})), name
        assert rawattn.explain_backward(**call).copied == ("do",) and "copied   do" in str(rawattn.explain_backward(**call))
    dlse = module.broadcast_to(lse_one, good["lse"].shape)
    assert rawattn.explain_backward(**good, dlse=dlse).copied == ("dlse",)
    kept = sum(good[name].nbytes for name in ("q", "k", "v", "o", "lse"))
    assert f"\nkept     {kept} bytes" in str(rawattn.explain_backward(**good, dlse=dlse))
    whole = np.ones(good["lse"].shape, np.float32) if library == "numpy" else torch.ones(good["lse"].shape)
    assert same(rawattn.attention_backward(**good, dlse=dlse), rawattn.attention_backward(**good, dlse=whole))
    heads = good["do"][:, :, ::2], good["do"][:, ::2]
    assert all(making.dense(x) is x for x in (good["do"], *heads, good["do"][:0])), "what kernels read is not copied"


ROWS = [  # shape, strides, itemsize, pointer; whether only a copy has rows that begin at 16 bytes
    ((2, 70, 4, 64), (17920, 256, 64, 1), 2, 512, False),
    ((2, 70, 4, 64), (18130, 259, 64, 1), 2, 512, True),
    ((2, 1, 4, 64), (17920, 259, 64, 1), 2, 512, False),
    ((2, 70, 4, 64), (17920, 256, 64, 1), 2, 520, True),
    ((2, 70, 4, 64), (17920, -256, 64, 1), 4, 512, True),
    ((2, 70, 4, 63), (17640, 252, 63, 1), 2, 512, False),
    ((2, 70, 4, 64), (18130, 259, 64, 1), 8, 512, False),
    ((2, 0, 4, 64), (18130, 259, 64, 1), 2, 520, False),
]


@pytest.mark.parametrize("shape, strides, itemsize, pointer, wanted", ROWS)
def test_rows_that_begin_anywhere(shape: Any, strides: Any, itemsize: int, pointer: int, wanted: bool) -> None:
    assert making._begins_anywhere(shape, strides, itemsize, pointer) is wanted


def test_concurrent_calls() -> None:
    good = tensors()
    wanted, wrong = rawattn.attention_backward(**good), []

    def work() -> None:
        for _ in range(20):
            if not same(rawattn.attention_backward(**good), wanted):
                wrong.append(1)

    at_once(work, [()] * 6)
    assert not wrong


def test_plan() -> None:
    good = tensors()
    plan = rawattn.plan_backward(**good, causal=True)
    assert same(plan.run(**good), rawattn.attention_backward(**good, causal=True))
    assert repr(plan).startswith("Plan(Backward of Forward fp32") and plan.kernel == "cpu"
    with pytest.raises(ProblemError, match="do has a stride of 0 in its last dimension"):
        plan.run(**good | {"do": np.broadcast_to(np.float32(1), good["do"].shape)})
    with pytest.raises(ProblemError, match="dlse was given; this plan takes do, q, k, v, o, lse"):
        plan.run(*good.values(), good["lse"])


class Twisted(Scale):
    """A score without a slope."""

    slope: Any = None  # type: ignore[assignment]


WRONG: dict[str, tuple[Any, str]] = {
    "do is None": (lambda x: {"do": None}, "do is None; it must be an array"),
    "lse is None": (lambda x: {"lse": None}, "lse is None; it must be an array"),
    "q is None": (lambda x: {"q": None}, "q is None; it must be an array"),
    "shape of do": (lambda x: {"do": x["q"]}, r"do is a numpy fp32 array of shape .*64\).*it must be .*32\)"),
    "dtype of o": (lambda x: {"o": x["o"].astype(np.float16)}, "o is a numpy fp16 array .* it must be a numpy fp32"),
    "dtype of lse": (lambda x: {"lse": x["lse"].astype(np.float64)}, "lse is a numpy fp64 array"),
    "library of do": (lambda x: {"do": torch.tensor(x["do"])}, "do is a torch fp32 array .* it must be a numpy"),
    "strides of lse": (lambda x: {"lse": x["lse"].swapaxes(1, 2).copy().swapaxes(1, 2)}, "lse has a stride of 4"),
    "batch stride of lse": (lambda x: {"lse": np.repeat(x["lse"], 2, 0)[::2]}, "lse has strides .* it must be contiguous"),
    "columns of o": (lambda x: {"o": np.repeat(x["o"], 2, -1)[..., ::2]}, "o has a stride of 2 in its last dimension"),
    "shape of dlse": (lambda x: {"dlse": x["lse"][:, :1]}, "dlse is a numpy fp32 array of shape"),
    "sinks": (lambda x: {"sinks": np.zeros(2, np.float32)}, r"sinks is fp32 of shape \(2,\)"),
    "half of cu_seqlens": (lambda x: {"cu_seqlens_q": np.zeros(2, np.int32)}, "q has 4 dimensions"),
    "window": (lambda x: {"window": 3}, "window is 3; it must be a pair"),
    "kernel": (lambda x: {"kernel": "attn_fwd"}, "kernel is 'attn_fwd'; it must be None or one of 'attn_bwd'"),
    "config": (lambda x: {"config": 3}, "config is 3; it must be None or .*attn_bwd.AttnBwdConfig"),
    "number of outputs": (lambda x: {"out": (None, None)}, "out has 2 arrays; it must have one for each of dq, dk, dv"),
    "dk is k": (lambda x: {"out": (None, x["k"], None)}, r"out \(dk\) overlaps k in memory"),
    "dk is dv": (lambda x: {"out": (None, x["dk"], x["dk"][..., :32])}, r"out \(dv\) overlaps out \(dk\)"),
    "read-only dv": (lambda x: {"out": (None, None, np.broadcast_to(np.float32(0), x["v"].shape))}, r"out \(dv\) "),
}


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_what_is_wrong(change: Any, message: str) -> None:
    good = tensors()
    changed = change(good | {"dk": np.zeros_like(good["k"])})
    with pytest.raises(ProblemError, match=message):
        rawattn.attention_backward(**good | changed)


@pytest.mark.parametrize("options, reason", [({"constant_time": True}, "constant_time"), ({"score": Twisted()}, "slope")])
def test_what_is_not_supported(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        rawattn.attention_backward(**tensors(), **options)


def test_requires_grad() -> None:
    good = tensors("torch")
    good["q"].requires_grad_()
    with pytest.raises(ProblemError, match="requires grad"):
        rawattn.attention_backward(**good)
    with torch.no_grad():
        rawattn.attention_backward(**good)


# ---- the operation

OP = operations.backward((64, 64), batch=2, q_len=300, kv_len=400, heads=4, kv_heads=2)
VARLEN = operations.backward(
    (128, 64), batch=3, q_len=99, kv_len=88, varlen=True, total_q=200, total_kv=150, sinks=True, dlse=True
)


def changed(op: Backward, **changes: Any) -> Backward:
    own = {name: changes.pop(name) for name in ("dlse", "layout") if name in changes}
    return dataclasses.replace(op, forward=replace(op.forward, **changes), **own)


def test_operation() -> None:
    forward = OP.forward
    assert [each.name for each in OP.inputs] == ["do", "q", "k", "v", "o", "lse"]
    assert [each.name for each in VARLEN.inputs] == [*Backward.names[:-5]]  # there are no lengths, no seed and no lists
    assert [each.name for each in VARLEN.outputs] == ["dq", "dk", "dv", "dsinks"]
    assert [each.shape for each in VARLEN.outputs] == [(200, 16, 128), (150, 16, 128), (150, 16, 64), (16,)]
    assert {each.role for each in OP.inputs} == {"in"} and {each.role for each in OP.outputs} == {"out"}
    assert OP.flops == 2 * (3 * 64 + 2 * 64) * 2 * 4 * 300 * 400 and 2 * OP.flops == 5 * forward.flops
    read = 2 * (2 * 300 * 4 * 64 * 3 + 2 * 400 * 2 * 64 * 2) + 4 * 2 * 4 * 300
    assert OP.bytes == read + 2 * (2 * 300 * 4 * 64 + 2 * 400 * 2 * 64 * 2)
    assert Backward(replace(forward, return_lse=True, layout=Layout("x"))) == OP, "they make no difference"
    assert OP.resized(3, 5, 7) == changed(OP, batch=3, q_len=5, kv_len=7)
    assert OP.kind == OP.resized(3, 5, 7).kind != changed(OP, dlse=True).kind
    assert str(VARLEN).startswith("Backward of Forward bf16 batch 3") and str(VARLEN).endswith("sinks, dlse")


@pytest.mark.parametrize(
    "op",
    [OP, VARLEN, changed(OP, mask=Window(3, 4), score=Softcap(2.0), scale=-0.1, layout=Layout("a", "b"), dlse=True)],
    ids=str,
)
def test_json(op: Backward) -> None:
    assert from_json(json.loads(json.dumps(op.to_json()))) == op
    assert from_json(op.forward.to_json()) == op.forward


def test_log_and_warm_up(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    monkeypatch.setenv("RAWATTN_LOG", str(path))
    rawattn.attention_backward(**tensors(), softcap=3.25)
    found = [from_json(json.loads(line)) for line in path.read_text().splitlines()]
    assert [type(op) for op in found] == [Forward, Backward] or [type(op) for op in found] == [Backward]
    loaded: list[Any] = []
    monkeypatch.setattr(record, "load_all", lambda op, selection, device: loaded.append((op, selection.kernel.name)))
    monkeypatch.setattr(record.context, "device", lambda index: H200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rawattn.warm_up(str(path)) == len(found)
    assert loaded[-1] == (found[-1], "attn_bwd_mma")


# ---- the selection


def selected(op: Backward, arch: str = "sm_90a", **options: Any) -> Any:
    return select(op, TYPICAL[arch] if arch != "cpu" else this_cpu(), **options)


SELECTED: list[tuple[dict[str, Any], str, str, bool]] = [  # changes, architecture, kernel, slow
    ({}, "sm_90a", "attn_bwd", False),
    ({"head_dim": 128, "head_dim_v": 8}, "sm_90a", "attn_bwd", False),
    ({"head_dim": 136}, "sm_90a", "attn_bwd", False),
    ({"head_dim": 168, "head_dim_v": 160}, "sm_90a", "attn_bwd_pair", False),
    ({"head_dim_v": 256}, "sm_90a", "attn_bwd_pair", False),
    ({"head_dim": 100}, "sm_90a", "attn_bwd_simt", True),
    ({"head_dim": 264}, "sm_90a", "attn_bwd_mma", False),
    ({"element": FP32}, "sm_90a", "attn_bwd_mma", False),
    ({"element": FP32, "head_dim": 256}, "sm_90a", "attn_bwd_mma", False),
    ({"element": FP32, "head_dim": 100}, "sm_90a", "attn_bwd_simt", True),
    ({"element": FP64}, "sm_90a", "attn_bwd_simt", True),
    ({"element": FP64}, "sm_75", "attn_bwd_simt", False),
    ({}, "sm_75", "attn_bwd_simt", False),
    ({}, "sm_80", "attn_bwd_mma", False),
    ({"deterministic": False}, "sm_89", "attn_bwd_mma", False),
    ({"head_dim": 256, "head_dim_v": 136}, "sm_120", "attn_bwd_mma", False),
    ({"head_dim": 100}, "sm_100", "attn_bwd_simt", True),
    ({"element": FP32}, "sm_75", "attn_bwd_simt", False),
    ({"element": FP32, "sinks": True}, "sm_86", "attn_bwd_mma", False),
    ({"element": FP32, "head_dim_v": 256}, "sm_80", "attn_bwd_simt", True),
    ({}, "cpu", "cpu", False),
]


@pytest.mark.parametrize("changes, arch, kernel, slow", SELECTED, ids=str)
def test_selection(changes: dict[str, Any], arch: str, kernel: str, slow: bool) -> None:
    found = selected(changed(OP, **changes), arch)
    assert (found.kernel.name, found.slow is not None) == (kernel, slow), found
    assert found.kernel.legal(found.config, changed(OP, **changes), TYPICAL.get(arch, this_cpu())) is None


def test_float32_by_tensor_cores() -> None:
    op = changed(OP, element=FP32)
    wanted = "attn_bwd_simt computes this, slowly; attn_bwd_mma, which is made for .*: head_dim is 300; it takes multiples of 8"
    assert re.match(wanted, str(selected(changed(op, head_dim=300)).slow))
    slow = selected(changed(op, layout=Layout(None, "do has a row stride of 4 bytes"))).slow
    assert slow is not None and re.match(
        "attn_bwd_simt computes this, slowly; attn_bwd_mma, .*: do has a row stride of 4 bytes", slow
    )
    first = ATTN_BWD_MMA.lower(op, attn_bwd_mma.config_of(op.forward, H200), H200).launches[0]
    assert "constexpr int vector = 4;" in dict(first.source.headers)["config.cuh"], "what it reads at once is aligned to 16 bytes"
    with pytest.raises(UnsupportedError, match="attn_bwd_mma: head_dim is 136; it takes multiples of 8 from 8 to 128"):
        selected(changed(op, head_dim=136), "sm_80", kernel="attn_bwd_mma")
    with pytest.raises(UnsupportedError, match="attn_bwd_mma: it takes bf16, fp16 and fp32, not fp64"):
        selected(changed(op, element=FP64), kernel="attn_bwd_mma")


def test_layouts() -> None:
    """A layout that only a copy would mend is refused in words; a slower kernel computes it where it is asked for."""
    slower = {Layout("do has a row stride of 4 bytes", None): "'attn_bwd_mma' or ", Layout(None, "o has an address"): ""}
    for layout, others in slower.items():
        op = changed(OP, layout=layout)
        with pytest.raises(UnsupportedError, match=rf"attn_bwd: (do|o) has .*kernel={others}'attn_bwd_simt'"):
            selected(op)
        assert selected(op, kernel="attn_bwd_simt").kernel is ATTN_BWD_SIMT
    with pytest.raises(UnsupportedError, match="attn_bwd_pair: do has"):
        selected(changed(OP, head_dim=256, layout=Layout("do has a row stride of 4 bytes", None)))


def test_configs() -> None:
    unordered = dataclasses.replace(attn_bwd.config_of(OP.forward), store="unordered")
    with pytest.raises(ProblemError, match="deterministic=False"):
        selected(OP, config=unordered)
    assert selected(changed(OP, deterministic=False), config=unordered).config == unordered
    stores = [selected(changed(OP, deterministic=each), kernel="attn_bwd_mma").config.store for each in (True, False)]
    assert stores == ["ordered", "unordered"]
    with pytest.raises(ProblemError, match="deterministic=False"):
        selected(OP, config=attn_bwd_mma.AttnBwdMmaConfig(store="unordered"), kernel="attn_bwd_mma")
    with pytest.raises(ProblemError, match=r"attn_bwd_pair takes a rawattn\.kernel\.attn_bwd_pair\.AttnBwdPairConfig"):
        selected(OP, kernel="attn_bwd_pair", config=attn_bwd.AttnBwdConfig())


@pytest.mark.parametrize(
    "config, message",
    [
        (attn_bwd.AttnBwdConfig(consumers=4), "consumers is 4"),
        (attn_bwd.AttnBwdConfig(dq_parts=3), "dq_parts is 3"),
        (attn_bwd.AttnBwdConfig(dq_columns=32), "dq has 32 columns"),
        (attn_bwd.AttnBwdConfig(store="late"), "store is 'late'"),
        (attn_bwd.AttnBwdConfig(direction="Down"), "direction 'Down'"),
        (attn_bwd.AttnBwdConfig(order="soon"), "order is 'soon'"),
        (attn_bwd.AttnBwdConfig(steps="three"), "steps is 'three'"),
        (attn_bwd.AttnBwdConfig(dq_parts=2, dq_columns=64, order="step_later", steps="apart"), "needs order 'at_once'"),
        (attn_bwd.AttnBwdConfig(order="step_later"), "a part of dq for each of its makers"),
        (attn_bwd.AttnBwdConfig(consumer_registers=240), "registers are 40 and 240"),
        (attn_bwd.AttnBwdConfig(consumers=3, consumer_registers=152, dq_parts=3, dq_columns=64), "bytes of shared memory"),
        (attn_bwd.AttnBwdConfig(do_stages=3), "must be 1 or 2"),
        (attn_bwd.AttnBwdConfig(dq_parts=2, dq_columns=64, order="step_later", ds_stages=1), "dS that is read later"),
        (attn_bwd.AttnBwdConfig(dq_parts=2, dq_columns=104), "two of up to 96 may share a panel"),
        (attn_bwd.AttnBwdConfig(dq_stages=1, store="final"), "it needs dq_stages 2"),
        (attn_bwd_pair.AttnBwdPairConfig(q_block=64), "q_block is 64"),
        (attn_bwd_pair.AttnBwdPairConfig(q_consumer_registers=240), "a block has 504"),
        (attn_bwd_pair.AttnBwdPairConfig(tile_kv=256), "bytes of shared memory"),
        (attn_bwd_mma.AttnBwdMmaConfig(warps=6), "warps is 6"),
        (attn_bwd_mma.AttnBwdMmaConfig(tile_q=16), "tile_q is 16"),
        (attn_bwd_mma.AttnBwdMmaConfig(warps=4, m_tiles_per_warp=1, sharing=4), "tile_kv 16"),
        (attn_bwd_mma.AttnBwdMmaConfig(chunk_q=64), "divides the 32 queries"),
        (attn_bwd_mma.AttnBwdMmaConfig(tile_q=32, chunk_q=16, dq_row_warps=4), "dq_row_warps is 4"),
        (attn_bwd_mma.AttnBwdMmaConfig(q_stages=3), "q_stages is 3"),
        (attn_bwd_mma.AttnBwdMmaConfig(store="late"), "store is 'late'"),
        (attn_bwd_mma.AttnBwdMmaConfig(dq_vector=2), "dq_vector is 2"),
        (attn_bwd_mma.AttnBwdMmaConfig(), "bytes of shared memory"),
        (attn_bwd_simt.AttnBwdSimtConfig(chunk=8), "chunk is 8"),
        (attn_bwd_simt.AttnBwdSimtConfig(tile_q=512), "bytes of shared memory"),
    ],
    ids=str,
)
def test_illegal_configs(config: Any, message: str) -> None:
    kernel: Any = next(k for k in (ATTN_BWD, ATTN_BWD_PAIR, ATTN_BWD_MMA, ATTN_BWD_SIMT) if isinstance(config, k.config_type))
    op = changed(OP, head_dim=128, head_dim_v=128) if kernel is ATTN_BWD else changed(OP, head_dim=256, head_dim_v=256)
    reason = kernel.legal(config, op, H200)
    assert reason is not None and message in reason


def test_lists_are_taken_in_the_order_of_their_turns() -> None:
    """Another direction would let blocks wait for works that nobody has begun."""
    op = changed(OP, head_dim=128, head_dim_v=128, mask=lists.Listed(Causal()))
    for kernel, config in ((ATTN_BWD, attn_bwd.config_of(op.forward)), (ATTN_BWD_MMA, attn_bwd_mma.config_of(op.forward, H200))):
        found = {x: kernel.legal(dataclasses.replace(config, direction=x), op, H200) for x in ("", *DIRECTIONS)}  # type: ignore
        assert [x for x in found if found[x] is None] == ["", "ShortestFirst"]
        assert str(found["Ascending"]).startswith("direction is 'Ascending'")
        (main,) = (each for each in kernel.lower(op, config, H200).launches if each.entry == kernel.name)  # type: ignore
        assert "ShortestFirst>" in dict(main.source.headers)["config.cuh"]


def test_more_tiles_than_can_be_counted() -> None:
    """The number of a tile, and of a place in scratch, fits an int32."""
    for kernel, rows, places in ((ATTN_BWD, 64, 2), (ATTN_BWD_PAIR, 128, 2), (ATTN_BWD_MMA, 32, 1), (ATTN_BWD_SIMT, 16, 1)):
        most = backward.tiling.MOST_TILES // places
        fits = operations.backward((64, 64), batch=most, q_len=rows, kv_len=1, heads=1, kv_heads=1)
        assert kernel.supports(fits, H200) == []  # type: ignore[attr-defined]
        for changes in ({"q_len": rows + 1}, {"kv_len": 129}, {"heads": 2}):
            (reason,) = kernel.supports(changed(fits, **changes), H200)  # type: ignore[attr-defined]
            assert f"it counts up to {most} tiles of" in reason


# ---- programs

PROGRAMS = [
    OP,
    VARLEN,
    changed(OP, mask=Causal(), score=Softcap(3.0)),
    changed(OP, head_dim=256, dlse=True),
    changed(OP, element=FP32, sinks=True),
    changed(VARLEN, element=FP64, head_dim=300),
]


def program(op: Backward, device: Device = H200) -> Any:
    """A work has all query heads of a key head here (tests/host/kernel/test_group.py has parts of them)."""
    found = select(op, device)
    config = dataclasses.replace(found.config, parts=1) if hasattr(found.config, "parts") else found.config
    return found.kernel.lower(op, config, device), config


@pytest.mark.parametrize("op", PROGRAMS, ids=str)
def test_fields(op: Backward) -> None:
    """Each field of each launch is filled by something that is there."""
    made, _ = program(op)
    operands = {each.name for each in (*op.inputs, *op.outputs)}
    buffers = {each.name for each in made.scratch}
    written = set()
    for launch in made.launches:
        assert launch.grid > 0
        for field in launch.fields:
            if isinstance(field.fill, Value):
                assert int(launch.values[field.name]) < 1 << 31
            elif isinstance(field.fill, Scratch):
                assert field.fill.name in buffers
            elif not isinstance(field.fill, (Counter, Violations)):
                assert field.fill.operand in operands
                written.add(field.fill.operand)
        assert len({field.name for field in launch.fields}) == len(launch.fields)
        render.layout(launch.fields, op.number)
    assert written == operands, "an operand that no launch sees"


def test_scratch() -> None:
    made, config = program(OP)
    rows = 4 * 2 * 320  # of whole blocks
    assert made.scratch == (
        Buffer("lse_log2", 4 * rows), Buffer("delta", 4 * rows), Buffer("dq_sum", 4 * rows * config.dq_columns * config.dq_parts),
        Buffer("turns", 4 * 4 * 2 * 5 * config.dq_chains),
    )  # fmt: skip
    made, config = program(VARLEN)
    assert made.scratch[0] == Buffer("lse_log2", 4 * 16 * (200 // 64 + 3) * 64), "a place for each, with gaps"
    made, _ = program(changed(OP, head_dim=256))
    assert [each.bytes for each in made.scratch] == [4 * 4 * 2 * 384] * 2
    made, _ = program(changed(OP, element=FP64))
    assert [each.bytes for each in made.scratch] == [8 * rows] * 2


NAMES = {
    "short": (OP, ["attn_bwd_delta", "attn_bwd"]),
    "long": (changed(OP, q_len=4096, kv_len=8192), ["attn_bwd_delta", "attn_bwd", "attn_bwd_convert"]),
    "wide": (changed(OP, head_dim=256), ["attn_bwd_delta", "attn_bwd_dkdv", "attn_bwd_dq"]),
    "fp32": (changed(OP, element=FP32), ["attn_bwd_delta", "attn_bwd_mma", "attn_bwd_convert"]),
    "fp64": (changed(OP, element=FP64), ["attn_bwd_delta", "attn_bwd_dkdv_simt", "attn_bwd_dq_simt"]),
    "packed": (VARLEN, ["attn_bwd_padding", "attn_bwd_delta", "attn_bwd", "attn_bwd_dsinks"]),
    "no queries": (changed(OP, q_len=0), ["attn_bwd"]),
    "no keys": (changed(OP, kv_len=0), ["attn_bwd_delta"]),
    "no keys, wide": (changed(OP, kv_len=0, head_dim=256), ["attn_bwd_delta", "attn_bwd_dq"]),
    "nothing": (changed(OP, q_len=0, kv_len=0), []),
    "no batch": (changed(OP, batch=0), []),
    "no batch, sinks": (changed(OP, batch=0, sinks=True), ["attn_bwd_dsinks"]),
    "no rows, packed": (changed(VARLEN, total_q=0, total_kv=0), ["attn_bwd_dsinks"]),
}


@pytest.mark.parametrize("op, names", NAMES.values(), ids=NAMES)
def test_launches(op: Backward, names: list[str]) -> None:
    assert [launch.entry for launch in program(op)[0].launches] == names


def test_a_kind_is_rendered_once() -> None:
    first, second = (program(op)[0].launches for op in (OP, OP.resized(1, 999, 77)))
    assert all(a.source is b.source and a.fields is b.fields for a, b in zip(first, second, strict=True))
    assert [launch.grid for launch in first] != [launch.grid for launch in second]


def test_stores() -> None:
    for store, entries in (("final", 2), ("unordered", 3)):
        config = dataclasses.replace(attn_bwd.config_of(OP.forward, store), parts=1)
        made = ATTN_BWD.lower(OP, config, H200)
        assert len(made.launches) == entries and ("turns" in {each.name for each in made.scratch}) == (store == "final")


ORDERS = {  # head_dim, length, mask, what else -> how dq is made, and finished, by how many warpgroups
    "long": ((128, 16384, Full(), {}), ("step_later", "ordered", 2)),
    "4k": ((128, 4096, Full(), {}), ("step_later", "ordered", 2)),
    "2k": ((128, 2048, Full(), {}), ("at_once", "final", 2)),
    "short": ((128, 512, Full(), {}), ("at_once", "final", 2)),
    "causal": ((128, 8192, Causal(), {}), ("step_later", "ordered", 2)),
    "causal, 4k": ((128, 4096, Causal(), {}), ("at_once", "final", 2)),
    "causal, short": ((128, 512, Causal(), {}), ("at_once", "final", 2)),
    "small head": ((64, 16384, Full(), {}), ("at_once", "ordered", 2)),
    "small head, more waves": ((64, 40960, Full(), {}), ("at_once", "ordered", 3)),
    "softcap": ((128, 16384, Full(), {"score": Softcap(2.0)}), ("at_once", "ordered", 2)),
    "window": ((128, 16384, Window(9000, 9000), {}), ("at_once", "ordered", 2)),
    "window and softcap": ((64, 16384, Window(9000, 9000), {"score": Softcap(2.0)}), ("at_once", "ordered", 2)),
    "offsets": ((128, 16384, Full(), {"q_offset": 0, "kv_offset": 0}), ("at_once", "ordered", 2)),
}


@pytest.mark.parametrize("asked, wanted", ORDERS.values(), ids=ORDERS)
def test_orders(asked: tuple[int, int, Any, dict[str, Any]], wanted: tuple[str, str, int]) -> None:
    """dq is made a step later where that was measured to be faster (perf/notes/attn_bwd.md)."""
    size, length, mask, more = asked
    op = changed(OP, head_dim=size, head_dim_v=size, q_len=length, kv_len=length, mask=mask, **more)
    config = selected(op).config
    assert (config.order, config.store, config.consumers) == wanted


def test_scratch_of_mma() -> None:
    """Sums of dq for whole blocks of rows, and turns where they are added in order."""
    for deterministic, name in ((True, "turns"), (False, None)):
        op = changed(OP, deterministic=deterministic)
        made, _ = program(op, TYPICAL["sm_80"])
        assert [launch.entry for launch in made.launches] == ["attn_bwd_delta", "attn_bwd_mma", "attn_bwd_convert"]
        sizes = {each.name: each.bytes for each in made.scratch}
        assert sizes.pop("dq_sum") == 4 * 64 * 4 * 2 * 320 and sizes.pop("turns", None) == (4 * 4 * 2 * 5 if name else None)
        assert [*sizes] == ["lse_log2", "delta"]
        assert not any(isinstance(field.fill, Counter) for field in made.launches[1].fields)
    packed = ATTN_BWD_MMA.lower(VARLEN, attn_bwd_mma.config_of(VARLEN.forward, H200), H200).launches
    assert [each.entry for each in packed][1:] == ["attn_bwd_delta", "attn_bwd_mma", "attn_bwd_convert", "attn_bwd_dsinks"]
    assert attn_bwd_mma.config_of(OP.forward, TYPICAL["sm_89"]).dq_vector == 1, "red of four numbers is from sm_90 on"
