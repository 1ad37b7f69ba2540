"""The forward as a frozen value: what arrays it is made from, what it refuses, its size in numbers, and its way to JSON."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.array.array import CPU, Array
from rawattn.driver.device import TYPICAL
from rawattn.driver.device import cpu as this_cpu
from rawattn.errors import ProblemError, UnsupportedError
from rawattn.operation.base import FEW_ROWS
from rawattn.operation.forward import LONGEST, Forward, check_has_seed, limits
from rawattn.operation.operand import Layout, Operand
from rawattn.operation.spec import Spec
from rawattn.runtime.select import KERNELS, select
from rawattn.variant.element import BF16, FP32, FP64
from rawattn.variant.mask import UNBOUNDED, Causal, Window
from tests.operations import forward, replace

DENSE = forward(BF16, 2, 5, 7, 4, 2, 8, 16)
VARLEN = forward(BF16, 3, 5, 7, 4, 2, 8, 16, varlen=True, total_q=9, total_kv=11, return_lse=True)


def array(*shape: int, dtype: str = "bf16", library: str = "torch", device: int = 0, pointer: int = 1 << 20) -> Array:
    """The description of a contiguous array."""
    return Array(library, device, dtype, shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))), pointer, None)


def dense(**changes: Any) -> dict[str, Array]:
    return {"q": array(2, 5, 4, 8), "k": array(2, 7, 2, 8), "v": array(2, 7, 2, 16), **changes}


def varlen(**changes: Any) -> dict[str, Array]:
    starts = {name: array(4, dtype="int32") for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    return {"q": array(9, 4, 8), "k": array(11, 2, 8), "v": array(11, 2, 16), **starts, **changes}


def refused(arrays: dict[str, Array], *parts: str, lengths: tuple[Any, Any] = (None, None)) -> None:
    with pytest.raises(ProblemError) as caught:
        Forward.of(arrays, Spec(), *lengths)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_of_arrays() -> None:
    assert Forward.of(dense(), Spec()) == DENSE
    assert Forward.of(varlen(), Spec(return_lse=True), 5, 7) == VARLEN
    unaligned = Forward.of(dense(v=array(2, 7, 2, 16, pointer=8)), Spec()).layout
    assert unaligned.tma_unsupported is not None and unaligned.tma_unsupported.startswith("v begins")
    assert unaligned.unaligned is not None and unaligned.unaligned.startswith("v has an address")
    on_cpu = {name: each._replace(device=CPU, pointer=8) for name, each in dense().items()}
    assert Forward.of(on_cpu, Spec()).layout == Layout(), "NumPy reads what lies anyhow"


# what is wrong -> the whole message
WRONG: dict[str, dict[str, Array]] = {
    "q has 3 dimensions, (2, 5, 8); it must have 4, (batch, length, heads, head_dim).": dense(q=array(2, 5, 8)),
    "v has 5 dimensions, (2, 7, 2, 16, 1); it must have 4, (batch, length, heads, head_dim).": dense(v=array(2, 7, 2, 16, 1)),
    "k has 4 dimensions, (1, 11, 2, 8); it must have 3, (total, heads, head_dim): k.reshape(-1, *k.shape[2:]) joins batch "
    "and length.": varlen(k=array(1, 11, 2, 8)),
    "k is a cupy array but q a torch one; give all arrays from one library.": dense(k=array(2, 7, 2, 8, library="cupy")),
    "v is on GPU 3 but q is on GPU 0; put all arrays on one device.": dense(v=array(2, 7, 2, 16, device=3)),
    "k is on the CPU but q is on GPU 0; put all arrays on one device.": dense(k=array(2, 7, 2, 8, device=CPU)),
    "q has dtype int8; it must be bf16, fp16, fp32 or fp64.": dense(q=array(2, 5, 4, 8, dtype="int8")),
    "v has dtype fp16 but q has bf16; they must be the same.": dense(v=array(2, 7, 2, 16, dtype="fp16")),
    "k has head_dim 24 but q has 8; give k head_dim 8.": dense(k=array(2, 7, 2, 24)),
    "v has shape (2, 7, 4, 16) but k (2, 7, 2, 8); all but the last dimension must be the same.": dense(v=array(2, 7, 4, 16)),
    "k has batch 3 but q has 2; they must be the same.": dense(k=array(3, 7, 2, 8), v=array(3, 7, 2, 16)),
    "q has 3 heads but k has 2; the heads of q must be a multiple of those of k and v.": dense(q=array(2, 5, 3, 8)),
    "kv_heads is 0; it must be at least 1.": dense(k=array(2, 7, 0, 8), v=array(2, 7, 0, 16)),
    "cu_seqlens_q is for 1 sequences but cu_seqlens_kv for 3; they must be as many.": varlen(
        cu_seqlens_q=array(2, dtype="int32")
    ),
    "cu_seqlens_q has shape (0,); it must be (batch + 1,).": varlen(cu_seqlens_q=array(0, dtype="int32")),
    "cu_seqlens_kv has shape (4, 1); it must be (batch + 1,).": varlen(cu_seqlens_kv=array(4, 1, dtype="int32")),
    "cu_seqlens_kv is on GPU 1 but q is on GPU 0; put all arrays on one device.": varlen(
        cu_seqlens_kv=array(4, dtype="int32", device=1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message, arrays", WRONG.items(), ids=map(str, range(len(WRONG))))
def test_arrays_that_contradict_each_other(message: str, arrays: dict[str, Array]) -> None:
    with pytest.raises(ProblemError) as caught:
        Forward.of(arrays, Spec())
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_kv"])
def test_an_array_is_missing(name: str) -> None:
    found = varlen()
    del found[name]
    refused(found, f"{name} is None; it must be an array" if len(name) == 1 else f"{name} is missing; packed sequences need")


def test_no_sequences() -> None:
    none = {name: array(1, dtype="int32") for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    assert Forward.of(varlen(**none), Spec()).batch == 0


@pytest.mark.parametrize("length, bound", [(None, 9), (0, 0), (5, 5), (9, 9), (10**12, 9), (np.int32(4), 4), (np.array(4), 4)])
def test_max_seqlen_is_a_bound_that_may_be_missing(length: Any, bound: int) -> None:
    found = Forward.of(varlen(), Spec(), length, length)
    assert (found.q_len, found.kv_len) == (bound, min(bound, 11) if length is not None and length != 10**12 else 11)
    assert (found.total_q, found.total_kv) == (9, 11)


@pytest.mark.parametrize("length", [True, -1, 5.0, "5", np.array([5]), [5], np.array(5.0), np.float32(5)], ids=repr)
def test_wrong_max_seqlen(length: Any) -> None:
    refused(varlen(), f"max_seqlen_q is {length!r}; it must be an int >= 0, or None.", lengths=(length, None))
    refused(varlen(), f"max_seqlen_kv is {length!r}; it must be an int >= 0, or None.", lengths=(5, length))
    refused(dense(), "without cu_seqlens_q", lengths=(length, None))
    refused(dense(), "without cu_seqlens_q", lengths=(None, length))


def test_head_dim_0() -> None:
    refused(dense(q=array(2, 5, 4, 0), k=array(2, 7, 2, 0)), "q has head_dim 0, (2, 5, 4, 0); it must be at least 1")
    refused(dense(v=array(2, 7, 2, 0)), "v has head_dim 0")


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_kv"])
def test_int64_cu_seqlens(name: str) -> None:
    wrong = {name: array(4, dtype="torch.int64")}
    refused(varlen(**wrong), f"{name} has dtype torch.int64; it must be int32: {name}.int() in torch, {name}.astype('int32')")
    refused(varlen(**{name: array(4, dtype="fp32")}), f"{name} has dtype fp32; it must be int32: {name}.int() in torch")


# ---- sinks ---------------------------------------------------------------------------------------------------------------

SINKS: dict[str, tuple[Array, str]] = {
    "dtype": (array(4, dtype="bf16"), "sinks is bf16 of shape (4,); it must be fp32 of shape (4,), one for each head of q"),
    "heads of k": (array(2, dtype="fp32"), "sinks is fp32 of shape (2,); it must be fp32 of shape (4,)"),
    "rank": (array(1, 4, dtype="fp32"), "sinks is fp32 of shape (1, 4)"),
    "library": (array(4, dtype="fp32", library="cupy"), "sinks is a cupy array but q a torch one"),
    "device": (array(4, dtype="fp32", device=1), "sinks is on GPU 1 but q is on GPU 0"),
    "stride": (array(4, dtype="fp32")._replace(strides=(2,)), "sinks has a stride of 2"),
    "no head": (array(dtype="fp32"), "sinks is fp32 of shape ()"),
}


@pytest.mark.parametrize("sinks, message", SINKS.values(), ids=SINKS)
def test_wrong_sinks(sinks: Array, message: str) -> None:
    refused(dense(sinks=sinks), message)
    refused(varlen(sinks=sinks), message)


def test_sinks() -> None:
    op = Forward.of(dense(sinks=array(4, dtype="fp32")), Spec())
    assert op == replace(DENSE, sinks=True) and op.kind != DENSE.kind and op.inputs[-1] == Operand("sinks", "fp32", (4,))
    assert "sinks" in str(op) and "sinks" not in str(DENSE)
    double = {name: each._replace(dtype="fp64") for name, each in dense().items()}
    refused(double | {"sinks": array(4, dtype="fp32")}, "it must be fp64")
    assert Forward.of(double | {"sinks": array(4, dtype="fp64")}, Spec()).sinks


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_every_kernel_has_sinks(kernel: Any) -> None:
    device = this_cpu() if kernel.name == "cpu" else TYPICAL["sm_90a"]
    op = replace(DENSE, head_dim=264) if kernel.name == "attn_fwd_wide" else DENSE
    assert kernel.supports(replace(op, sinks=True), device) == [] == kernel.supports(op, device)


def test_sinks_reach_the_result() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 5, 2, 8), np.float32)
    sinks = np.array([1.5, -np.inf], np.float32)
    o, lse = rawattn.attention(q, k, v, sinks=sinks, return_lse=True)
    expected, expected_lse = rawattn.reference.attention(q, k, v, sinks=sinks, return_lse=True)
    assert np.allclose(o, expected, atol=1e-5) and np.allclose(lse, expected_lse, atol=1e-5)
    plain = rawattn.attention(q, k, v)
    assert np.allclose(o[:, :, 1], plain[:, :, 1], atol=1e-5) and not np.allclose(o[:, :, 0], plain[:, :, 0], atol=1e-2)
    for call in (rawattn.attention, rawattn.plan, rawattn.explain):
        with pytest.raises(ProblemError, match="sinks is fp64"):
            call(q, k, v, sinks=sinks.astype(np.float64))


# ---- limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim", "head_dim_v"])
def test_at_least_one(name: str) -> None:
    assert getattr(replace(DENSE, **{"heads": 2, "kv_heads": 1, name: 1}), name) == 1
    for wrong in (0, -1):
        with pytest.raises(ProblemError, match=f"^{name} is {wrong}; it must be at least 1"):
            replace(DENSE, **{name: wrong})


@pytest.mark.parametrize("name", ["q_len", "kv_len", "total_q", "total_kv"])
def test_longest(name: str) -> None:
    for length in (0, LONGEST - 1):
        assert getattr(replace(VARLEN, **{name: length}), name) == length
    for wrong in (-1, LONGEST):
        with pytest.raises(ProblemError, match=f"{name} is {wrong}; it must be from 0 to {LONGEST - 1}"):
            replace(VARLEN, **{name: wrong})
        if not name.startswith("total"):
            with pytest.raises(ProblemError, match=f"{name} is {wrong}"):
                replace(DENSE, **{name: wrong})


def test_longest_of_arrays() -> None:
    refused(dense(k=array(2, LONGEST, 2, 8), v=array(2, LONGEST, 2, 16)), f"kv_len is {LONGEST}")
    refused(varlen(q=array(LONGEST, 4, 8)), f"q_len is {LONGEST}")
    refused(varlen(q=array(LONGEST, 4, 8)), f"total_q is {LONGEST}", lengths=(5, None))
    many = Forward.of(dense(q=array(4, LONGEST - 1, 4, 8), k=array(4, 7, 2, 8), v=array(4, 7, 2, 16)), Spec())
    assert many.total_q == 4 * (LONGEST - 1), "it bounds one sequence, not all"


def test_batch() -> None:
    assert replace(DENSE, batch=0).total_kv == 0
    with pytest.raises(ProblemError, match="batch is -1"):
        replace(DENSE, batch=-1)


def test_an_unbounded_window_reaches_every_key() -> None:
    """A side of None from the first query to the last key, and no sum of a position and a side leaves an int32."""
    q, longest = np.array([0, LONGEST - 2]), LONGEST - 1
    for mask in (Window(), Window(None, None, "top_left")):
        begin, end = mask.interval(q, longest, longest)
        assert begin.tolist() == [0, 0] and end.tolist() == [longest, longest]
    assert Window(LONGEST).values == Window().values == Window(10**20, 10**20).values
    assert longest - 1 + UNBOUNDED < 1 << 31


def test_heads() -> None:
    assert (DENSE.heads_per_kv, replace(DENSE, heads=6, kv_heads=2).heads_per_kv) == (2, 3)
    with pytest.raises(ProblemError, match="q has 5 heads but k has 2"):
        replace(DENSE, heads=5)


# ---- its numbers ---------------------------------------------------------------------------------------------------------


def test_operands() -> None:
    assert DENSE.inputs == (
        Operand("q", "bf16", (2, 5, 4, 8)),
        Operand("k", "bf16", (2, 7, 2, 8)),
        Operand("v", "bf16", (2, 7, 2, 16)),
    )
    assert DENSE.outputs == (Operand("o", "bf16", (2, 5, 4, 16), "out"),)
    starts = tuple(Operand(f"cu_seqlens_{side}", "int32", (4,)) for side in ("q", "kv"))
    assert VARLEN.inputs == (
        Operand("q", "bf16", (9, 4, 8)),
        Operand("k", "bf16", (11, 2, 8)),
        Operand("v", "bf16", (11, 2, 16)),
        *starts,
    )
    assert VARLEN.outputs == (Operand("o", "bf16", (9, 4, 16), "out"), Operand("lse", "fp32", (4, 9), "out", True))
    assert replace(DENSE, element=FP64, return_lse=True).outputs[1] == Operand("lse", "fp64", (2, 4, 5), "out", True)
    for op in (DENSE, VARLEN, replace(DENSE, sinks=True), replace(VARLEN, sinks=True)):
        names = [operand.name for operand in op.inputs]
        assert names == [name for name in Forward.names if name in names]


def test_totals_follow_from_dense_lengths() -> None:
    assert (DENSE.total_q, DENSE.total_kv) == (10, 14)
    assert replace(DENSE, q_len=6, total_q=99).total_q == 12
    assert (VARLEN.total_q, VARLEN.total_kv) == (9, 11)


def test_flops() -> None:
    """Two operations for each multiplication of q k^T and of p v, over the pairs that the mask keeps."""
    assert (DENSE.pairs, DENSE.flops) == (35, 2 * 35 * (8 + 16) * 2 * 4)
    square = forward(BF16, 3, 10, 10, 4, 2, 8, 16, mask=Causal())
    assert (square.pairs, square.flops) == (55, 2 * 55 * (8 + 16) * 3 * 4)
    assert replace(DENSE, q_len=0).flops == 0
    assert (VARLEN.pairs, VARLEN.flops) == (3 * 4, 2 * 3 * 4 * 24 * 3 * 4), "of three sequences of 3 queries and 11 / 3 keys"
    assert (replace(VARLEN, batch=0).flops, replace(VARLEN, batch=0).pairs) == (0, 35)


def test_bytes() -> None:
    q, k, v, o, lse = 2 * 5 * 4 * 8, 2 * 7 * 2 * 8, 2 * 7 * 2 * 16, 2 * 5 * 4 * 16, 2 * 5 * 4
    assert DENSE.bytes == 2 * (q + k + v + o)
    assert replace(DENSE, return_lse=True).bytes == 2 * (q + k + v + o) + 4 * lse
    assert replace(DENSE, element=FP64, return_lse=True).bytes == 8 * (q + k + v + o + lse)
    assert VARLEN.bytes == 2 * (9 * 4 * 8 + 11 * 2 * 8 + 11 * 2 * 16 + 9 * 4 * 16) + 4 * 4 * 9 + 2 * 4 * 4


def test_scale() -> None:
    assert DENSE.scale == 8**-0.5 and replace(DENSE, scale=0.0).scale == 0.0 and replace(DENSE, scale=-2.0).scale == -2.0


def test_kind_is_what_is_compiled_in() -> None:
    same = [{"batch": 9}, {"q_len": 9}, {"kv_len": 9}, {"heads": 8}, {"kv_heads": 4}, {"scale": 3.0}, {"layout": Layout("a")}]
    other: list[dict[str, Any]] = [
        {"element": FP32}, {"head_dim": 16}, {"head_dim_v": 8}, {"varlen": True}, {"sinks": True}, {"mask": Causal()},
        {"scale": -1.0}, {"return_lse": True}, {"constant_time": True},
    ]  # fmt: skip
    assert {replace(DENSE, **change).kind for change in same} == {DENSE.kind}
    assert len({DENSE.kind, *(replace(DENSE, **change).kind for change in other)}) == 1 + len(other)


# ---- as text and JSON ----------------------------------------------------------------------------------------------------


def test_in_words() -> None:
    assert str(DENSE) == "Forward bf16 batch 2, length 5x7, heads 4/2, head_dim 8/16, Full(), Scale()"
    square = forward(BF16, 2, 5, 5, 4, 4, 8, 8, return_lse=True, sinks=True)
    assert str(square) == "Forward bf16 batch 2, length 5, heads 4, head_dim 8, Full(), Scale(), return_lse, sinks"
    assert str(VARLEN).startswith("Forward bf16 batch 3, length 5x7, varlen, 9 and 11 rows, heads 4/2, head_dim 8/16, Full()")


def test_json_has_what_differs() -> None:
    assert DENSE.to_json() == {
        "operation": "Forward", "element": "bf16", "batch": 2, "q_len": 5, "kv_len": 7, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "head_dim_v": 16, "total_q": 10, "total_kv": 14, "spec": {}, "layout": [None, None],
    }  # fmt: skip
    for op in (replace(VARLEN, sinks=True), replace(DENSE, layout=Layout("a", "b"))):
        assert Forward.from_json(op.to_json()) == op


def test_errors_name_the_lengths_that_were_given() -> None:
    """Though operations of nearly the same size share a selection."""
    with pytest.raises(UnsupportedError, match="length 1001x1003"):
        select(replace(DENSE, q_len=1001, kv_len=1003, head_dim=1000), TYPICAL["sm_90a"])


def test_resized_is_replaced() -> None:
    assert DENSE.flops and DENSE.inputs  # which are kept with the value
    found, wanted = DENSE.resized(3, 9, 11), replace(DENSE, batch=3, q_len=9, kv_len=11)
    assert found == wanted and (found.flops, found.bytes, found.inputs) == (wanted.flops, wanted.bytes, wanted.inputs)


# ---- keys of calls -------------------------------------------------------------------------------------------------------

NO_OFFSETS: dict[str, Any] = {"q_offset": None, "kv_offset": None}


def form(*shape: int, dtype: str = "float32", alignment: int = 0, place: Any = "gpu 0", last: int = 1) -> tuple[Any, ...]:
    """An array's form: its address modulo 16, dtype, shape, strides, and the device."""
    strides = *(math.prod(shape[i + 1 :]) for i in range(len(shape) - 1)), last
    return alignment, np.dtype(dtype), shape, strides, place


def family(q: Any = None, k: Any = None, v: Any = None, **offsets: Any) -> Any:
    """The key of 2 x 5 queries of 4 heads, 9 keys of 2, or of other forms."""
    plain = form(2, 5, 4, 8), form(2, 9, 2, 8), form(2, 9, 2, 16)
    given = tuple(each or usual for each, usual in zip((q, k, v), plain, strict=True))
    return Forward.family(given, {**NO_OFFSETS, **offsets})


def test_family() -> None:
    """A key for each: lengths to three significant bits, heads and columns as they are."""
    assert family() == (np.dtype("float32"), "gpu 0", 2, 5, 10, 4, 2, 8, 16)
    assert family() == family(k=form(2, 10, 2, 8), v=form(2, 10, 2, 16)) == family(q_offset=FEW_ROWS - 1)
    most = FEW_ROWS // 4 - 1
    assert family(form(1, most, 4, 8), form(1, 9, 2, 8), form(1, 9, 2, 16)) is not None
    assert family(*(form(1, n, 4, 8) for n in (5, FEW_ROWS - 1, FEW_ROWS - 1))) is not None


OUTSIDE: dict[str, dict[str, Any]] = {
    "rank": {"q": form(5, 4, 8)},
    "empty": {"q": form(2, 0, 4, 8)},
    "columns": {"k": form(2, 9, 2, 8, last=2)},
    "dtype": {"v": form(2, 9, 2, 16, dtype="float16")},
    "place": {"k": form(2, 9, 2, 8, place="gpu 1")},
    "address": {"v": form(2, 9, 2, 16, alignment=8)},
    "keys without values": {"v": form(2, 8, 2, 16)},
    "heads of v": {"v": form(2, 9, 4, 16)},
    "batch": {"q": form(3, 5, 4, 8)},
    "head_dim": {"q": form(2, 5, 4, 16)},
    "many queries": {"q": form(2, FEW_ROWS // 8, 4, 8)},
    "many keys": {name: form(1, FEW_ROWS if name != "q" else 5, 4, 8) for name in "qkv"},
    "far queries": {"q_offset": FEW_ROWS},
    "far keys": {"kv_offset": FEW_ROWS, "q_offset": 3},
}


@pytest.mark.parametrize("given", OUTSIDE.values(), ids=OUTSIDE)
def test_no_family(given: dict[str, Any]) -> None:
    assert family(**given) is None


def test_no_family_of_other_arrays() -> None:
    each = form(2, 5, 4, 8)
    assert Forward.family((each, each, each), NO_OFFSETS) is not None
    assert Forward.family((each, each, each, each), NO_OFFSETS) is None and Forward.family((each, each, ()), NO_OFFSETS) is None


def test_coarse_offsets() -> None:
    assert Forward.coarse(NO_OFFSETS) is NO_OFFSETS
    assert Forward.coarse({"q_offset": 1025, "kv_offset": None, "causal": 1}) == {"q_offset": 1280, "kv_offset": 0, "causal": 1}
    assert Forward.coarse({"q_offset": 9, "kv_offset": 11})["kv_offset"] == 12


def test_resized_to_arrays() -> None:
    """The lengths of q and k, and the offsets; the same value where all are its own."""
    assert DENSE.resized_to(dense(), NO_OFFSETS) is DENSE
    for arrays, offsets, changes in (
        (dense(q=array(2, 6, 4, 8)), NO_OFFSETS, {"q_len": 6}),
        (dense(k=array(2, 8, 2, 8)), NO_OFFSETS, {"kv_len": 8}),
        (dense(q=array(3, 5, 4, 8)), NO_OFFSETS, {"batch": 3}),
        (dense(), {"q_offset": 3, "kv_offset": None}, {"q_offset": 3, "kv_offset": 0}),
    ):
        assert DENSE.resized_to(arrays, offsets) == replace(DENSE, **changes)


def test_rounded() -> None:
    """Operations of nearly the same size share a key; offsets stay where positions end."""
    op = replace(DENSE, q_len=17, kv_len=33, batch=9, q_offset=1025, kv_offset=LONGEST - 40)
    near = op.rounded()
    assert (near.batch, near.q_len, near.kv_len, near.total_q, near.total_kv) == (10, 20, 40, 200, 400)
    assert near.spec.offsets == (1280, LONGEST - 1 - 40)
    assert op.selection_key == replace(op, q_offset=1027).selection_key != replace(op, q_len=21).selection_key
    packed = replace(VARLEN, q_len=9, total_q=17, total_kv=33, q_offset=LONGEST - 18, kv_offset=0).rounded()
    assert (packed.q_len, packed.total_q, packed.total_kv, packed.spec.offsets) == (10, 20, 40, (LONGEST - 1 - 20, 0))


def test_limits_of_functions() -> None:
    """Offsets count, and of packed sequences all rows."""
    assert limits(dense(), {}) == limits(dense(), NO_OFFSETS) == (2, 4, 5, 7, 0, 0, 0)
    assert limits(dense(), {"q_offset": 10, "kv_offset": 20}) == (2, 4, 15, 27, 0, 0, 0)
    assert limits(varlen(), {}) == (3, 4, 9, 11, 9, 11, 0)


def test_numbers_of_arrays() -> None:
    """Errors name the argument, the place, what is there and what is needed."""
    rows = {"q": np.zeros((9, 4, 8)), "k": np.zeros((11, 2, 8))}
    good = {**rows, "cu_seqlens_q": np.array([0, 4, 4, 9]), "cu_seqlens_kv": np.array([0, 3, 3, 10])}
    VARLEN.check_numbers({**good, "q_lens": np.array([4, 0, 5]), "kv_lens": np.array([0, 0, 7])})
    for name, starts, most in (
        ("cu_seqlens_q", [1, 4, 4, 9], 9), ("cu_seqlens_kv", [0, 4, 3, 9], 11), ("cu_seqlens_q", [0, 1, 1, 10], 9),
        ("cu_seqlens_kv", [0, 1, 1, 12], 11),
    ):  # fmt: skip
        with pytest.raises(ProblemError, match=f"{name} is .*end with at most {most}, {'q' if most == 9 else 'k'}'s rows"):
            VARLEN.check_numbers({**good, name: np.array(starts)})
    for name, lens, message in (
        ("q_lens", [4, 1, 5], r"q_lens\[1\] is 1; it must be from 0 to 0"), ("kv_lens", [3, 0, 8], r"kv_lens\[2\] is 8; .* to 7"),
        ("q_lens", [-1, 0, 6], r"q_lens\[0\] is -1; it must be from 0 to 4, the sequence's rows of q"),
    ):  # fmt: skip
        with pytest.raises(ProblemError, match=message):
            VARLEN.check_numbers({**good, name: np.array(lens)})
    plain = {"q": np.zeros((2, 5, 4, 8)), "k": np.zeros((2, 7, 2, 8))}
    DENSE.check_numbers({**plain, "q_lens": np.array([0, 5]), "kv_lens": np.array([7, 7])})
    with pytest.raises(ProblemError, match=r"kv_lens\[1\] is 8; it must be from 0 to 7"):
        DENSE.check_numbers({**plain, "kv_lens": np.array([7, 8])})


def test_one_length_for_each_sequence() -> None:
    for given, batch in ((dense, 2), (varlen, 3)):
        for name in ("q_lens", "kv_lens"):
            assert getattr(Forward.of(given(**{name: array(batch, dtype="int32")}), Spec()), name) is True
            refused(
                given(**{name: array(8, dtype="int32")}), f"{name} is int32 of shape (8,); it must be int32 of shape ({batch},)"
            )


SEEDS = {
    "is fp32 of shape (1,); it must be an int, or one int64 in an array of shape (1,)": array(1, dtype="fp32"),
    "is int64 of shape (2,)": array(2, dtype="int64"),
    "is int64 of shape ()": array(dtype="int64"),
    "is on GPU 1 but q is on GPU 0": array(1, dtype="int64", device=1),
}


@pytest.mark.parametrize("message, seed", SEEDS.items())
def test_wrong_seed(message: str, seed: Array) -> None:
    refused(dense(seed=seed), f"seed {message}")


def test_a_seed_goes_with_dropout() -> None:
    seed = array(1, dtype="int64")
    assert Forward.of(dense(seed=seed), Spec(dropout=0.5)).spec.dropout == 0.5
    check_has_seed({"seed": seed}, 0.5), check_has_seed({}, 0.0)
    with pytest.raises(ProblemError, match=r"seed was given, and dropout is 0\.0; it goes with a dropout above"):
        check_has_seed({"seed": seed}, 0.0)
    with pytest.raises(ProblemError, match=r"seed is missing, and dropout is 0\.5; it is needed for a dropout above"):
        check_has_seed({}, 0.5)
