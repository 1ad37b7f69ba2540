"""The public calls on the CPU, and what they say to each wrong argument. GPU arrays are stood in for by their descriptions."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import errors
from rawattn.array import reading
from rawattn.array.array import CPU, Array
from rawattn.cpu.forward import CpuConfig
from rawattn.driver import context
from rawattn.driver.device import TYPICAL, Device
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.kernel import attn_fwd
from rawattn.operation import Forward
from rawattn.operation.spec import Spec
from rawattn.runtime import select
from rawattn.variant.softmax import ConstantTime, Plain, SpeculativeMax
from tests.operations import replace

H200 = TYPICAL["sm_90a"]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs() -> dict[str, Any]:
    """Good arguments: 4 heads of q on 2 of k and v."""
    return {"q": normal(2, 5, 4, 8, seed=1), "k": normal(2, 7, 2, 8, seed=2), "v": normal(2, 7, 2, 16, seed=3)}


def packed() -> dict[str, Any]:
    """The same for sequences end to end, three of them."""
    return {
        "q": normal(9, 4, 8, seed=1), "k": normal(11, 2, 8, seed=2), "v": normal(11, 2, 16, seed=3),
        "cu_seqlens_q": np.array([0, 4, 4, 9], np.int32), "cu_seqlens_kv": np.array([0, 3, 10, 11], np.int32),
        "max_seqlen_q": 5, "max_seqlen_kv": 7,
    }  # fmt: skip


def refused(call: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    """The call raises the error, and its message has all the parts: the argument, what was given, what is needed."""
    with pytest.raises(error) as caught:
        call()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def torch() -> Any:
    return pytest.importorskip("torch")


# ---- what is wrong with arrays -------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rank of q": ({"q": normal(5, 4, 8)}, ["q has 3 dimensions", "(5, 4, 8)", "must have 4"]),
    "rank of k": ({"k": normal(2, 7, 2, 8, 1)}, ["k has 5 dimensions", "must have 4", "(batch, length, heads, head_dim)"]),
    "rank of v": ({"v": np.ones((), np.float32)}, ["v has 0 dimensions", "must have 4"]),
    "head_dim": ({"k": normal(2, 7, 2, 16)}, ["k has head_dim 16", "q has 8", "give k head_dim 8"]),
    "heads": ({"q": normal(2, 5, 3, 8)}, ["q has 3 heads", "k has 2", "multiple"]),
    "no heads": ({"k": normal(2, 7, 0, 8), "v": normal(2, 7, 0, 16)}, ["kv_heads is 0", "at least 1"]),
    "no columns": ({"v": normal(2, 7, 2, 0)}, ["v has head_dim 0", "(2, 7, 2, 0)", "at least 1"]),
    "heads of v": ({"v": normal(2, 7, 4, 16)}, ["v has shape (2, 7, 4, 16)", "k (2, 7, 2, 8)", "same"]),
    "lengths": ({"v": normal(2, 6, 2, 16)}, ["v has shape (2, 6, 2, 16)", "k (2, 7, 2, 8)", "same"]),
    "batch": ({"k": normal(1, 7, 2, 8), "v": normal(1, 7, 2, 16)}, ["k has batch 1", "q has 2", "same"]),
    "batch of v": ({"v": normal(1, 7, 2, 16)}, ["v has shape (1, 7, 2, 16)", "same"]),
    "mixed dtypes": ({"k": normal(2, 7, 2, 8, dtype=np.float16)}, ["k has dtype fp16", "q has fp32", "same"]),
    "unsupported dtype": ({"q": np.ones((2, 5, 4, 8), np.int64)}, ["q has dtype int64", "bf16, fp16, fp32 or fp64"]),
    "complex": ({"v": np.ones((2, 7, 2, 16), np.complex64)}, ["v has dtype complex64", "bf16, fp16, fp32 or fp64"]),
    "big-endian": ({"q": np.ones((2, 5, 4, 8), ">f4")}, ["q is big-endian", "byte order"]),
    "strided columns": ({"q": normal(2, 5, 4, 16)[..., ::2]}, ["q has a stride of 2 in its last dimension", "must be 1"]),
    "expanded columns": ({"v": np.broadcast_to(np.float32(1), (2, 7, 2, 16))}, ["v has a stride of 0", "must be 1"]),
    "strides between elements": (
        {"q": np.ndarray((2, 5, 4, 8), np.float32, bytes(4096), 0, (642, 128, 32, 4))}, ["q has strides of (642", "4 bytes"]
    ),
    "a list": ({"q": [[1.0, 2.0]]}, ["q is a list", "must be an array", "__dlpack__"]),
    "None": ({"v": None}, ["v is None", "must be an array"]),
    "a number": ({"k": 1.0}, ["k is a float", "must be an array"]),
}  # fmt: skip


@pytest.mark.parametrize("changes, parts", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", [rawattn.attention, rawattn.plan, rawattn.explain])
def test_wrong_array(call: Callable[..., Any], changes: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: call(**inputs() | changes), ProblemError, *parts)


def test_mixed_libraries() -> None:
    given = inputs()
    k = torch().from_numpy(given["k"])
    refused(lambda: rawattn.attention(given["q"], k, given["v"]), ProblemError, "k is a torch array", "numpy", "one library")


@pytest.mark.parametrize("kind", ["meta", "sparse"])
@pytest.mark.parametrize("call", [rawattn.plan, rawattn.explain])
def test_torch_tensor_without_memory(kind: str, call: Callable[..., Any]) -> None:
    """``attention`` gives meta tensors to torch's operator."""
    x = torch().ones(2, 5, 4, 8)
    x = x.to("meta") if kind == "meta" else x.to_sparse()
    refused(lambda: call(x, x, x), ProblemError, "q is", "meta" if kind == "meta" else "sparse")


# ---- what is wrong with options ------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "negative window": ({"window": (-2, 0)}, ["window left is -2", "must be >= 0", "None or -1"]),
    "window of floats": ({"window": (None, 1.5)}, ["window right is 1.5", "int >= 0"]),
    "window of one": ({"window": 128}, ["window is 128", "pair (left, right)"]),
    "window of three": ({"window": (1, 2, 3)}, ["window is (1, 2, 3)", "pair (left, right)"]),
    "softcap negative": ({"softcap": -30.0}, ["softcap is -30.0", "> 0"]),
    "softcap NaN": ({"softcap": float("nan")}, ["softcap is nan", "finite"]),
    "softcap text": ({"softcap": "30"}, ["softcap is '30'", "> 0"]),
    "scale NaN": ({"scale": float("nan")}, ["scale is nan", "finite number"]),
    "scale inf": ({"scale": float("inf")}, ["scale is inf", "finite number"]),
    "scale text": ({"scale": "big"}, ["scale is 'big'", "finite number"]),
    "causal": ({"causal": "yes"}, ["causal is 'yes'", "True or False"]),
    "return_lse": ({"return_lse": 2}, ["return_lse is 2", "True or False"]),
    "constant_time": ({"constant_time": "always"}, ["constant_time is 'always'", "True or False"]),
    "mask and causal": ({"mask": rawattn.mask.Full(), "causal": True}, ["mask was given beside causal", "And"]),
    "mask and window": ({"mask": rawattn.mask.Full(), "window": (1, 1)}, ["mask was given beside", "And"]),
    "score and softcap": ({"score": rawattn.score.Scale(), "softcap": 1.0}, ["score was given beside softcap"]),
    "mask of another kind": ({"mask": rawattn.score.Scale()}, ["mask is Scale()", "rawattn.mask"]),
    "mask as a class": ({"mask": rawattn.mask.Causal}, ["mask is <class", "rawattn.mask.Causal()"]),
    "score of another kind": ({"score": rawattn.mask.Causal()}, ["score is Causal", "rawattn.score"]),
    "score as a class": ({"score": rawattn.score.Softcap}, ["score is <class", "rawattn.score.Softcap(30.0)"]),
    "kernel": ({"kernel": "attention"}, ["kernel is 'attention'", "'attn_fwd_wide', 'attn_fwd_mma', 'attn_fwd_simt', 'cpu'"]),
    "config": ({"config": {"tile_q": 128}}, ["config is {'tile_q': 128}", "Config"]),
    "config of another kernel": ({"config": attn_fwd.AttnFwdConfig()}, ["config is AttnFwdConfig(", "cpu.forward.CpuConfig"]),
    "illegal config": ({"config": CpuConfig(tile_q=-1)}, ["config is CpuConfig(tile_q=-1", "tile_q is -1"]),
}  # fmt: skip


@pytest.mark.parametrize("options, parts", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("call", [rawattn.attention, rawattn.plan, rawattn.explain])
def test_wrong_option(call: Callable[..., Any], options: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: call(**inputs(), **options), ProblemError, *parts)


@pytest.mark.parametrize("call", [rawattn.attention, rawattn.plan, rawattn.explain])
def test_constant_time_is_refused_on_the_cpu(call: Callable[..., Any]) -> None:
    parts = "constant_time on CPU", "cpu: a CPU takes longer for some numbers", "constant_time is for GPUs"
    refused(lambda: call(**inputs(), constant_time=True), UnsupportedError, *parts)


@pytest.mark.parametrize("align", ["last", None])
def test_wrong_alignment(align: Any) -> None:
    for mask in (rawattn.mask.Causal, rawattn.mask.Window):
        refused(lambda mask=mask: mask(align=align), ProblemError, f"align is {align!r}", "'bottom_right', 'top_left'")


def test_both_takes_two_kinds_of_masks() -> None:
    causal = rawattn.mask.Causal()
    refused(lambda: rawattn.mask.And(causal, causal), ProblemError, "And(Causal", "twice")
    refused(lambda: rawattn.mask.And(causal, None), ProblemError, "b of And is None", "must be a mask")


# ---- packed sequences ----------------------------------------------------------------------------------------------------

PACKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "dtype": ({"cu_seqlens_q": np.array([0, 4, 4, 9])}, ["cu_seqlens_q has dtype int64", "cu_seqlens_q.astype('int32')"]),
    "an array as maximum": ({"max_seqlen_q": np.array([5])}, ["max_seqlen_q is array([5])", "an int >= 0, or None"]),
    "rank": ({"cu_seqlens_kv": np.zeros((2, 2), np.int32)}, ["cu_seqlens_kv has shape (2, 2)", "(batch + 1,)"]),
    "empty": ({"cu_seqlens_q": np.zeros(0, np.int32)}, ["cu_seqlens_q has shape (0,)", "(batch + 1,)"]),
    "strided": ({"cu_seqlens_q": np.zeros(8, np.int32)[::2]}, ["cu_seqlens_q has a stride of 2", "contiguous"]),
    "numbers": ({"cu_seqlens_q": np.array([0, 9], np.int32)}, ["cu_seqlens_q is for 1 sequences", "cu_seqlens_kv for 3"]),
    "list": ({"cu_seqlens_q": [0, 4, 4, 9]}, ["cu_seqlens_q is a list", "must be an array"]),
    "rank of q": ({"q": normal(1, 9, 4, 8)}, ["q has 4 dimensions", "must have 3", "(total, heads, head_dim)"]),
    "totals": ({"v": normal(10, 2, 16)}, ["v has shape (10, 2, 16)", "k (11, 2, 8)"]),
    "not from 0": ({"cu_seqlens_q": np.array([1, 4, 4, 9], np.int32)}, ["cu_seqlens_q is [1 4 4 9]", "begin with 0"]),
    "falling": ({"cu_seqlens_kv": np.array([0, 6, 5, 11], np.int32)}, ["cu_seqlens_kv is [ 0  6  5 11]", "never fall"]),
    "too many rows": ({"cu_seqlens_kv": np.array([0, 3, 9, 12], np.int32)}, ["cu_seqlens_kv is", "at most 11", "k's rows"]),
    "negative maximum": ({"max_seqlen_q": -1}, ["max_seqlen_q is -1", ">= 0"]),
    "maximum of text": ({"max_seqlen_kv": "7"}, ["max_seqlen_kv is '7'", "int >= 0"]),
}  # fmt: skip


@pytest.mark.parametrize("changes, parts", PACKED.values(), ids=PACKED)
def test_wrong_packing(changes: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: rawattn.attention_varlen(**packed() | changes), ProblemError, *parts)


def test_max_seqlen_changes_no_result() -> None:
    """Though it be missing, or too small."""
    call = packed()
    expected = rawattn.attention_varlen(**call)
    for q_len, kv_len in ((None, None), (0, 0), (1, 1), (1, None), (10**6, 3)):
        assert np.array_equal(rawattn.attention_varlen(**call | {"max_seqlen_q": q_len, "max_seqlen_kv": kv_len}), expected)


def test_the_options_of_flash_attn() -> None:
    expected = rawattn.attention(**inputs())
    for options in ({"window": (-1, -1)}, {"softcap": 0.0}, {"deterministic": False}, {"causal": np.False_}):
        assert np.array_equal(rawattn.attention(**inputs(), **options), expected)
    assert np.array_equal(rawattn.attention(**inputs(), causal=np.True_), rawattn.attention(**inputs(), causal=True))
    assert rawattn.attention_varlen(**packed(), deterministic=True, window=(-1, -1), softcap=0.0).shape == (9, 4, 16)


@pytest.mark.parametrize("window", [(-2, 5), (6, -3)], ids=str)
def test_a_band_beside_the_diagonal(window: tuple[int, int]) -> None:
    """Windows whose sides are negative are refused with the function that says them."""
    q, k, v = inputs().values()
    with pytest.raises(ProblemError) as error:
        rawattn.attention(q, k, v, window=window)
    side = eval(str(error.value).partition("mask=")[2].rstrip("."))
    o = rawattn.attention(q, k, v, mask=side)
    at = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - np.arange(k.shape[1])
    keep = at <= -2 if window[0] < 0 else -at <= -3
    assert 0 < keep.sum() < keep.size
    assert np.array_equal(o, rawattn.attention(q, k, v, mask=lambda b, h, q, kv: keep[q, kv]))


def test_cu_seqlens_of_another_library() -> None:
    starts = torch().tensor([0, 4, 4, 9], dtype=torch().int32)
    call = packed() | {"cu_seqlens_q": starts}
    refused(lambda: rawattn.attention_varlen(**call), ProblemError, "cu_seqlens_q is a torch array", "numpy", "one library")


def test_packing_by_halves() -> None:
    call = packed()
    del call["cu_seqlens_kv"]
    refused(lambda: rawattn.plan(**call), ProblemError, "cu_seqlens_kv is missing")
    refused(lambda: rawattn.plan(**inputs(), max_seqlen_q=5), ProblemError, "max_seqlen_q", "without cu_seqlens_q")


def test_packed_sequences() -> None:
    call = packed()
    out = np.full((9, 4, 16), np.nan, np.float32)
    o, lse = rawattn.attention_varlen(**call, causal=True, return_lse=True, out=out)
    assert o is out and lse.shape == (4, 9)
    starts = zip(itertools.pairwise(call["cu_seqlens_q"]), itertools.pairwise(call["cu_seqlens_kv"]), strict=True)
    for (q0, q1), (k0, k1) in starts:
        q, k, v = (x[None] for x in (call["q"][q0:q1], call["k"][k0:k1], call["v"][k0:k1]))
        alone, alone_lse = rawattn.attention(q, k, v, causal=True, return_lse=True)
        assert np.array_equal(o[q0:q1], alone[0]) and np.array_equal(lse[:, q0:q1], alone_lse[0])
    plan = rawattn.plan(call["q"], call["k"], call["v"], call["cu_seqlens_q"], call["cu_seqlens_kv"], causal=True)
    assert np.array_equal(plan.run(*list(call.values())[:5]), o)


# ---- out -----------------------------------------------------------------------------------------------------------------


def test_out() -> None:
    out = np.full((2, 5, 4, 16), np.nan, np.float32)
    assert rawattn.attention(**inputs(), out=out) is out
    assert np.array_equal(out, rawattn.attention(**inputs()))


OUT: dict[str, tuple[Any, list[str]]] = {
    "shape": (np.zeros((2, 5, 4, 8), np.float32), ["out is", "shape (2, 5, 4, 8)", "must be", "shape (2, 5, 4, 16)"]),
    "dtype": (np.zeros((2, 5, 4, 16), np.float64), ["out is a numpy fp64", "must be a numpy fp32"]),
    "list": ([0.0], ["out is a list", "must be an array"]),
    "strided": (np.zeros((2, 5, 4, 32), np.float32)[..., ::2], ["out has a stride of 2", "must be 1"]),
    "expanded": (np.lib.stride_tricks.as_strided(np.zeros((2, 5, 1, 16), np.float32), (2, 5, 4, 16), (320, 64, 0, 4)), [
        "several elements of out", "whole array"]),
}  # fmt: skip


@pytest.mark.parametrize("out, parts", OUT.values(), ids=OUT)
def test_wrong_out(out: Any, parts: list[str]) -> None:
    refused(lambda: rawattn.attention(**inputs(), out=out), ProblemError, *parts)


def test_out_of_another_library() -> None:
    out = torch().zeros(2, 5, 4, 16)
    refused(lambda: rawattn.attention(**inputs(), out=out), ProblemError, "out is a torch", "must be a numpy")


def test_out_on_cu_seqlens() -> None:
    memory = np.zeros(9 * 4 * 16 + 3, np.float32)
    starts = memory[-4:].view(np.int32)
    starts[:] = [0, 4, 4, 9]
    call = packed() | {"cu_seqlens_kv": starts, "out": memory[:-3].reshape(9, 4, 16)}
    refused(lambda: rawattn.attention_varlen(**call), ProblemError, "out overlaps cu_seqlens_kv", "its own")
    assert starts.tolist() == [0, 4, 4, 9]


def test_misaligned_out() -> None:
    out = np.ndarray((2, 5, 4, 16), np.float32, bytearray(4 * 640 + 2), 2)
    refused(lambda: rawattn.attention(**inputs(), out=out), ProblemError, "out has a pointer or stride", "multiple of 4 bytes")


def test_read_only_out() -> None:
    out = np.zeros((2, 5, 4, 16), np.float32)
    out.flags.writeable = False
    refused(lambda: rawattn.attention(**inputs(), out=out), ProblemError, "out is read-only", "writable")


def test_out_that_no_library_can_write() -> None:
    refused(
        lambda: rawattn.attention(**inputs(), out=Foreign(np.zeros((2, 5, 4, 16), np.float32))), ProblemError, "out is a Foreign"
    )


def test_out_that_is_an_input() -> None:
    q = normal(2, 5, 4, 8)
    for name, call in {"q": (q, q + 1, q + 2), "k": (q + 1, q, q + 2), "v": (q + 1, q + 2, q)}.items():
        refused(lambda call=call: rawattn.attention(*call, out=q), ProblemError, f"out overlaps {name}", "its own")


def test_out_that_shares_one_element_with_an_input() -> None:
    memory = normal(2 * 640 + 560)
    shape, size = (2, 5, 4, 16), 640
    k, v = normal(2, 7, 2, 16), memory[:448].reshape(2, 7, 2, 16)
    q = normal(*shape)
    apart, touching = memory[448 : 448 + size].reshape(shape), memory[447 : 447 + size].reshape(shape)
    assert rawattn.attention(q, k, v, out=apart) is apart
    refused(lambda: rawattn.attention(q, k, v, out=touching), ProblemError, "out overlaps v")


def test_out_between_the_inputs() -> None:
    """Interleaved with the inputs, and apart from them."""
    memory = normal(2, 5, 4, 3, 8)  # batch, length, (q, k, v, out), heads, head_dim
    q, k, v, out = (memory[:, :, i] for i in range(4))
    expected = rawattn.attention(q.copy(), k.copy(), v.copy())
    assert rawattn.attention(q, k, v, out=out) is out
    assert np.array_equal(out, expected)


# ---- plans ---------------------------------------------------------------------------------------------------------------


def test_plan_takes_only_what_it_was_made_for() -> None:
    good = inputs()
    plan = rawattn.plan(**good)
    assert np.array_equal(plan.run(**good), rawattn.attention(**good))
    wrong = {
        "k has another length": ({"k": normal(2, 8, 2, 8)}, ["k is", "(2, 8, 2, 8)", "must be", "(2, 7, 2, 8)"]),
        "q has another dtype": ({"q": normal(2, 5, 4, 8, dtype=np.float16)}, ["q is a numpy fp16", "must be a numpy fp32"]),
        "v is strided": ({"v": normal(2, 7, 2, 32)[..., ::2]}, ["v has a stride of 2", "must be 1"]),
        "sequences": ({"cu_seqlens_q": np.zeros(3, np.int32)}, ["cu_seqlens_q was given", "takes q, k, v"]),
        "no v": ({"v": None}, ["v is missing", "takes a numpy fp32 array of shape (2, 7, 2, 16) on the CPU"]),
    }
    for changes, parts in wrong.values():
        refused(lambda changes=changes: plan.run(**good | changes), ProblemError, *parts)
    starts = np.array([0, 5, 10], np.int32)
    refused(lambda: plan.run(*good.values(), starts, starts), ProblemError, "cu_seqlens_q was given", "takes q, k, v")
    refused(lambda: plan.run(good["q"], **good), ProblemError, "q was given")
    refused(lambda: plan.run(good["q"], good["k"]), ProblemError, "v is missing")
    q, k, v = (torch().from_numpy(x) for x in good.values())
    refused(lambda: plan.run(q, k, v), ProblemError, "q is a torch fp32", "must be a numpy fp32")


def test_plan_for_packed_sequences_needs_them() -> None:
    call = packed()
    plan = rawattn.plan(**call)
    refused(
        lambda: plan.run(call["q"], call["k"], call["v"]), ProblemError, "cu_seqlens_q is missing", "int32 array of shape (4,)"
    )
    call["cu_seqlens_q"] = call["cu_seqlens_q"].astype(np.int64)
    refused(lambda: plan.run(*list(call.values())[:5]), ProblemError, "cu_seqlens_q is a numpy int64", "int32")


def test_plan_says_what_it_is() -> None:
    plan = rawattn.plan(**inputs(), causal=True, return_lse=True)
    assert (plan.kernel, plan.binaries, plan.program, plan.device.arch) == ("cpu", (), None, "cpu")
    assert repr(plan).startswith(
        "Plan(Forward fp32 batch 2, length 5x7, heads 4/2, head_dim 8/16, Causal("
    ) and "return_lse; cpu, CpuConfig(" in repr(plan)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda way: way.__name__)
def test_plans_are_not_copied(way: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="a Plan holds kernels that are loaded in this process; copy or pickle its op"):
        way(rawattn.plan(**inputs()))
    op = rawattn.plan(**inputs(), causal=True).op
    assert way(op) in (op, pickle.dumps(op))


def test_plans_are_kept() -> None:
    assert rawattn.plan(**inputs()) is rawattn.plan(**inputs())
    assert rawattn.plan(**inputs()) is not rawattn.plan(**inputs(), softcap=3.0)


# ---- autograd ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_requires_grad(which: str) -> None:
    q, k, v = (torch().from_numpy(x) for x in inputs().values())
    call = {"q": q, "k": k, "v": v, "out": torch().zeros(2, 5, 4, 16)}
    plan = rawattn.plan(q, k, v)
    expected = rawattn.attention(q, k, v)
    call[which].requires_grad_()
    for run in (rawattn.attention, plan.run):
        refused(lambda run=run: run(**call), ProblemError, "requires grad", "torch.no_grad()", "detach")
    with torch().no_grad():
        assert torch().equal(rawattn.attention(**call), expected)
    assert not expected.requires_grad


# ---- what the calls give -------------------------------------------------------------------------------------------------

SHORTHANDS: list[tuple[dict[str, Any], rawattn.mask.Mask]] = [
    ({}, rawattn.mask.Full()),
    ({"causal": True}, rawattn.mask.Causal("bottom_right")),
    ({"window": (3, None)}, rawattn.mask.Window(3, None, "bottom_right")),
    ({"window": [3, 0]}, rawattn.mask.Window(3, 0)),
    ({"window": (1, 2), "causal": True}, rawattn.mask.And(rawattn.mask.Causal(), rawattn.mask.Window(1, 2))),
    ({"mask": rawattn.mask.Causal("top_left")}, rawattn.mask.Causal("top_left")),
]


@pytest.mark.parametrize("options, mask", SHORTHANDS)
def test_shorthands_build_masks(options: dict[str, Any], mask: rawattn.mask.Mask) -> None:
    assert rawattn.explain(**inputs(), **options).op.mask == mask
    expected = rawattn.reference.attention(**inputs(), mask=mask)
    assert np.allclose(rawattn.attention(**inputs(), **options), expected, atol=1e-5)


def test_shorthands_build_scores_and_scale() -> None:
    op = rawattn.explain(**inputs()).op
    assert (op.score, op.scale) == (rawattn.score.Scale(), 8**-0.5)
    op = rawattn.explain(**inputs(), softcap=20, scale=np.float32(0.5)).op
    assert (op.score, op.scale) == (rawattn.score.Softcap(20), 0.5)
    assert rawattn.explain(**inputs(), score=rawattn.score.Softcap(2.0)).op.score == rawattn.score.Softcap(2.0)


def test_lse_comes_beside_o() -> None:
    o, lse = rawattn.attention(**inputs(), return_lse=True)
    expected, expected_lse = rawattn.reference.attention(**inputs(), return_lse=True)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((2, 5, 4, 16), np.float32, (2, 4, 5), np.float32)
    assert np.allclose(o, expected, atol=1e-5) and np.allclose(lse, expected_lse, atol=1e-5)


def test_torch_gives_torch() -> None:
    o, lse = rawattn.attention(*(torch().from_numpy(x) for x in inputs().values()), return_lse=True)
    assert isinstance(o, torch().Tensor) and isinstance(lse, torch().Tensor)
    assert np.array_equal(o.numpy(), rawattn.attention(**inputs()))


@pytest.mark.parametrize("batch, q_len, kv_len", [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_empty(batch: int, q_len: int, kv_len: int) -> None:
    o, lse = rawattn.attention(
        normal(batch, q_len, 4, 8), normal(batch, kv_len, 2, 8), normal(batch, kv_len, 2, 16), return_lse=True
    )
    assert o.shape == (batch, q_len, 4, 16) and not o.any()
    assert lse.shape == (batch, 4, q_len) and (lse == -np.inf).all()


def test_explain_prints() -> None:
    lines = str(rawattn.explain(**inputs(), causal=True)).splitlines()
    patterns = (
        r"op       Forward fp32 batch 2, length 5x7, heads 4/2, head_dim 8/16, Causal\(.*\), Scale\(\)",
        r"device   CPU", r"kernel   cpu", *(rf"  not {name}: it needs a Hopper GPU .*" for name in ("attn_fwd", "attn_fwd_wide")),
        r"  not attn_fwd_simt: it needs a GPU .*", r"  not attn_fwd_mma: it needs a GPU .*", r"config   CpuConfig\(.*\)",
        r"  cheapest of \d+ by the cost model, which expects [\d,]+ us", r"work     \S+ FLOP, at least \S+ bytes",
    )  # fmt: skip
    for line, pattern in itertools.zip_longest(lines, patterns):
        assert re.fullmatch(pattern, line), line


def test_explain_of_a_given_config() -> None:
    config = CpuConfig(tile_q=32)
    found = rawattn.explain(**inputs(), kernel="cpu", config=config)
    assert found.selection.config is config and "given by the caller" in str(found)


# ---- other libraries -----------------------------------------------------------------------------------------------------


class Foreign:
    """An array of a library that rawattn has not heard of."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def test_foreign_arrays_are_read_in_place() -> None:
    given = inputs()["q"]
    found = reading.read(Foreign(given), "q")
    assert (found.library, found.device, found.pointer, found.shape) == ("numpy", CPU, given.ctypes.data, given.shape)


def test_a_foreign_library_without_an_adapter_gets_numpy() -> None:
    o = rawattn.attention(*(Foreign(x) for x in inputs().values()))
    assert isinstance(o, np.ndarray) and np.array_equal(o, rawattn.attention(**inputs()))


@pytest.mark.parametrize("adapter", ["module", "module.dlpack", "namespace"])
def test_a_foreign_library_gets_its_own(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("foreign")
    array = type("Array", (Foreign,), {"__module__": "foreign.core"})
    home = types.SimpleNamespace(from_dlpack=lambda x: array(np.from_dlpack(x)))
    if adapter == "namespace":
        array.__array_namespace__ = lambda self: home
    elif adapter == "module":
        module.from_dlpack = home.from_dlpack  # type: ignore[attr-defined]
    else:
        module.dlpack = home  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "foreign", module)
    o, lse = rawattn.attention(*(array(x) for x in inputs().values()), return_lse=True)
    assert type(o) is array and type(lse) is array
    assert np.array_equal(o.array, rawattn.attention(**inputs()))


def test_foreign_array_that_cannot_be_shared() -> None:
    class Stubborn(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("it lies in a database")

    q, k, v = inputs().values()
    refused(lambda: rawattn.attention(Stubborn(q), k, v), ProblemError, "q cannot be read without a copy", "in a database")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("__dlpack_device__", lambda self: None, "k is a Bad, whose __dlpack_device__ fails (TypeError: 'NoneType' object is"),
        ("__dlpack__", 7, "k cannot be read without a copy (TypeError: 'int' object is not callable); it is a Bad."),
        ("__dlpack__", lambda self, **options: {}["x"], "k cannot be read without a copy (KeyError: 'x'); it is a Bad."),
        ("__cuda_array_interface__", 5, "k has dtype int64"),
    ],
)
def test_foreign_array_with_a_bad_protocol(name: str, value: Any, message: str) -> None:
    q, k, v = inputs().values()
    bad = type("Bad", (Foreign,), {name: value})
    refused(lambda: rawattn.attention(q, bad(k.astype(np.int64)), v), ProblemError, message)


def test_foreign_array_on_a_device_of_another_kind() -> None:
    class Metal(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

    q, k, v = inputs().values()
    refused(lambda: rawattn.attention(q, Metal(k), v), ProblemError, "k lies on a device of DLPack kind 8", "CUDA GPU or the CPU")


# ---- GPUs, by description ------------------------------------------------------------------------------------------------


def on_gpu(
    *shape: int, dtype: str = "bf16", device: int = 0, pointer: int = 1 << 20, strides: tuple[int, ...] | None = None
) -> Array:
    """Returns what reading.read says of a CuPy array."""
    steps = [1]
    for size in shape[:0:-1]:
        steps.insert(0, steps[0] * size)
    return Array("cupy", device, dtype, shape, strides or tuple(steps), pointer, None)


def operation(*given: Array) -> Forward:
    """The operation on arrays in the order of ``Forward.names``."""
    return Forward.of(dict(zip(Forward.names, given, strict=False)), Spec())


def square(head_dim: int = 64, head_dim_v: int | None = None, **changes: Any) -> Forward:
    q = on_gpu(1, 16, 2, head_dim, **changes)
    return operation(q, q, on_gpu(1, 16, 2, head_dim_v or head_dim, **changes))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("device", TYPICAL.values(), ids=TYPICAL)
def test_constant_time_on_gpus(dtype: str, device: Device) -> None:
    """The same kernel in the same configuration, but for what time depends on; in fp32 attn_fwd_simt."""
    plain = square(dtype=dtype)
    steady = replace(plain, constant_time=True)
    first, second = select.select(plain, device), select.select(steady, device)
    if dtype == "fp32":
        assert second.kernel.name == "attn_fwd_simt"
        first = select.select(plain, device, "attn_fwd_simt")
    assert (first.kernel, first.config) == (second.kernel, second.config)
    found, usual = (kernel.options(op, config) for kernel, config, op in ((*second[:2], steady), (*first[:2], plain)))
    assert (found["Softmax"], usual["Softmax"]) in ((ConstantTime(), SpeculativeMax()), (Plain(), Plain()))
    assert all(getattr(option, "constant_time", option) == option for option in found.values())


def test_constant_time_is_refused_in_fp64() -> None:
    op = replace(square(dtype="fp64"), constant_time=True)
    refused(lambda: select.select(op, H200), UnsupportedError, "attn_fwd_simt: it takes longer for some numbers of fp64")


def test_cpu_kernel_for_gpu_arrays() -> None:
    refused(lambda: select.select(square(), H200, "cpu"), UnsupportedError, "cpu: it runs on the CPU", H200.name)


def test_mixed_devices() -> None:
    q = on_gpu(1, 16, 2, 64)
    elsewhere = q._replace(device=1)
    refused(lambda: operation(q, elsewhere, q), ProblemError, "k is on GPU 1", "q is on GPU 0", "one device")
    refused(lambda: operation(q, q, q._replace(device=CPU)), ProblemError, "v is on the CPU", "q is on GPU 0")
    packed = on_gpu(16, 2, 64)
    starts = Array("cupy", 0, "int32", (2,), (1,), 1 << 20, None)
    call = (packed, packed, packed, starts, starts._replace(device=1))
    refused(lambda: operation(*call), ProblemError, "cu_seqlens_kv is on GPU 1", "q is on GPU 0")


MISFITS = {
    "pointer": ({"pointer": (1 << 20) + 8}, "q begins at an address that is no multiple of 16 bytes"),
    "row stride": ({"strides": (80 * 132, 132, 64, 1)}, "q has a row stride of 264 bytes"),
    "head stride": ({"strides": (80 * 140, 140, 68, 1)}, "q has a row stride of 280 bytes"),
    "expanded rows": ({"strides": (2048, 0, 64, 1)}, "q has a row stride of 0 bytes"),
}


@pytest.mark.parametrize("changes, reason", MISFITS.values(), ids=MISFITS)
def test_array_that_the_copy_engine_cannot_read(changes: dict[str, Any], reason: str) -> None:
    op = operation(on_gpu(1, 80, 2, 64, **changes), *[on_gpu(1, 80, 2, 64)] * 2)
    refused(lambda: select.select(op, H200), UnsupportedError, f"attn_fwd: {reason}", "copy it: q.", "'attn_fwd_simt'")


def test_array_that_the_copy_engine_can_read() -> None:
    packed = on_gpu(1, 80, 2, 64, strides=(0, 384, 0, 1), pointer=(1 << 20) + 128)
    assert select.select(operation(packed, packed, packed), H200).kernel.name == "attn_fwd"


class OnGpu:
    """A class that stands for another library's array on a GPU."""

    __cuda_array_interface__ = types.MappingProxyType({"shape": (1,), "typestr": "<f4", "data": (4096, False), "version": 3})


class OnGpuByDlpack(Foreign):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_which_adapter_an_array_takes() -> None:
    """The one that says which stream to wait for, where there are two."""
    both = OnGpuByDlpack(inputs()["q"])
    assert reading._has_interface(OnGpu()) and not reading._has_interface(both)
    for version, taken in ((2, False), (3, True)):
        interface = dict(OnGpu.__cuda_array_interface__, version=version)
        both.__cuda_array_interface__ = interface  # type: ignore[attr-defined]
        assert reading._has_interface(both) is taken
        alone = types.SimpleNamespace(__cuda_array_interface__=interface)
        assert reading._has_interface(alone)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing(flags: int) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    context.library.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", types.SimpleNamespace(cuInit=missing))
    yield
    context.library.cache_clear()


@pytest.mark.parametrize("x", [OnGpu(), OnGpuByDlpack(inputs()["q"])], ids=["cuda_array_interface", "dlpack"])
def test_no_gpu(x: Any, no_driver: None) -> None:
    pytest.importorskip("cupy")
    refused(lambda: rawattn.attention(x, x, x), UnsupportedError, "no NVIDIA driver", "arrays on the CPU")
    refused(lambda: context.device(99), UnsupportedError, "no NVIDIA driver")
    assert context.device_count() == 0


@pytest.mark.parametrize("x", [OnGpu(), OnGpuByDlpack(inputs()["q"])], ids=["cuda_array_interface", "dlpack"])
def test_cupy_missing(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    parts = "q (a OnGpu", "needs CuPy", errors.INSTALL[12], errors.INSTALL[13]
    refused(lambda: rawattn.attention(x, x, x), UnsupportedError, *parts)


def test_an_export_that_is_a_copy_lives_through_the_call() -> None:
    """An array that gives another piece of memory each time it is read, by a plan that has read it before."""

    class Copied:
        def __init__(self, x: Any) -> None:
            self.x = x

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            return self.x.copy().__dlpack__()

    given = [np.random.default_rng(i).normal(size=(1, 200, 4, 64)).astype(np.float32) for i in range(3)]
    plan = rawattn.plan(*given)
    for _ in range(3):
        found = plan.run(*map(Copied, given))
        assert np.array_equal(np.from_dlpack(found) if not isinstance(found, np.ndarray) else found, plan.run(*given))
