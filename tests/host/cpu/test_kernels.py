"""The CPU path, against the reference; its promises about bits, threads, memory around the arrays, compilation and torch."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import types
import weakref
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from numba import njit

import rawattn
from rawattn import ProblemError, UnsupportedError, reference
from rawattn.compile import cache
from rawattn.compile.compiler import sole_process
from rawattn.cpu import forward, lanes, loops
from rawattn.cpu.forward import CpuConfig
from rawattn.cpu.kernels import CPU, Cpu
from rawattn.driver.device import TYPICAL, Device
from rawattn.driver.device import cpu as this_cpu
from rawattn.kernel.base import Kernel
from rawattn.testing import Case, expect
from rawattn.variant import Option
from rawattn.variant.element import ELEMENTS
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Scale, Softcap
from tests.calls import attend
from tests.operations import replace
from tests.options import HeadWindow, cases
from tests.threads import at_once

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]

LISTED = [
    Case(q_len=200, kv_len=333, heads=4, kv_heads=2),
    Case(q_len=257, kv_len=257, causal=True, head_dim=72, head_dim_v=40, layout="packed"),
    Case(q_len=300, kv_len=100, causal=True),  # most queries are before the first key
    Case(q_len=100, kv_len=300, mask=Causal("top_left"), layout="heads_first"),
    Case(q_len=200, kv_len=500, window=(20, 3), heads=3, kv_heads=3, head_dim=33, head_dim_v=1),
    Case(q_len=500, kv_len=500, causal=True, window=(64, 0), batch=2, layout="reversed"),
    Case(q_len=128, kv_len=400, mask=And(Causal("top_left"), Window(300, 5))),
    Case(q_len=200, kv_len=200, softcap=5.0, scale=-1.0),
    Case(q_len=300, kv_len=300, scale=2 / 8, heads=2),
    Case(q_len=64, kv_len=64, head_dim=1024, head_dim_v=1, layout="padded"),
    Case(q_len=64, kv_len=64, head_dim=1, head_dim_v=1024),
    Case(q_len=1, kv_len=3000, heads=32, kv_heads=2, causal=True, layout="expanded"),
    Case(q_len=3, kv_len=2, heads=600, kv_heads=1, head_dim=8, head_dim_v=8),  # more heads to a key than rows to a unit
    Case(q_len=100, kv_len=70, heads=6, kv_heads=2, causal=True, sinks=True),
    Case(lengths=((5, 300), (0, 40), (200, 0), (129, 129), (0, 0), (300, 7)), heads=2, kv_heads=1, causal=True),
    Case(batch=0), Case(q_len=0), Case(kv_len=0), Case(lengths=()), Case(lengths=((0, 0),)),
]  # fmt: skip


def run(case: Case, inputs: tuple[Any, ...] | None = None, config: CpuConfig | None = None) -> Arrays:
    """o, in the layout of q, and lse; both NaN before."""
    op, device = case.op, this_cpu()
    assert CPU.supports(op, device) == []
    if config is None:
        config = best(case, device.sm_count)
    assert CPU.legal(config, op, device) is None
    q, k, v, *cu_seqlens = inputs or case.inputs()
    o = case.out()
    lse = np.full((*o.shape[:-3], o.shape[-2], o.shape[-3]), np.nan, op.element.lse_dtype)
    CPU.run(op, config, q, k, v, o, lse, *cu_seqlens, sinks=case.sink_logits() if case.sinks else None)
    return o, lse


def check(case: Case) -> None:
    inputs = case.inputs()
    o, lse = run(case, inputs)
    expect(*inputs, **case.options).check(o, lse)
    memory = o
    while memory.base is not None:
        memory = memory.base
    assert np.isnan(memory).sum() == memory.size - o.size, "something beside o was written"


def bits(arrays: Arrays) -> list[bytes]:
    return [x.tobytes() for x in arrays]


@settings(max_examples=80)
@given(cases(sinks=None))
def test_reference(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_listed(case: Case, dtype: str) -> None:
    check(dataclasses.replace(case, dtype=dtype))


# ---- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("case", [c for c in LISTED if c.op.q_len > 1 and c.op.kv_len > 1], ids=lambda case: case.name)
def test_masked_numbers_take_no_part(case: Case, which: str, bad: float) -> None:
    """Some keys, or some elements of v, are not finite: all rows that the mask keeps them from are as the reference says."""
    case = dataclasses.replace(case, dtype="fp32")
    q, k, v, *cu_seqlens = case.inputs()
    x = k if which == "k" else v
    if case.layout != "expanded":
        x[..., 1 :: max(2, x.shape[-3] // 3), :, 0] = bad
    expected = expect(q, k, v, *cu_seqlens, **case.options)
    o, lse = run(case, (q, k, v, *cu_seqlens))
    if which == "v":  # of several infinities in a sum, the reference may see a probability of 0 where float32 sees none
        finite = np.isfinite(expected.o)
        np.testing.assert_array_equal(np.isfinite(o), finite)
        expected = dataclasses.replace(expected, o=np.where(finite, expected.o, 0.0))
        o = np.where(finite, o, 0)
    expected.check(o, lse)


def test_nan_and_inf_spread_along_their_rows() -> None:
    case = Case("fp32", q_len=40, kv_len=200, causal=True)
    q, k, v = case.inputs()
    q[0, 3, 0, 0], q[0, 17, 0, 1], k[0, 190] = math.nan, math.inf, -math.inf
    o, lse = run(case, (q, k, v))
    expect(q, k, v, causal=True).check(o, lse)
    assert np.isnan(o[0, [3, 17]]).all() and np.isfinite(o[0, 4]).all()


def test_logits_of_minus_infinity() -> None:
    case = Case("fp32", q_len=40, kv_len=200)
    q, k, v = (abs(x) for x in case.inputs())
    k[0, :150] = -math.inf  # a whole tile and more, before the first finite logit
    expect(q, k, v).check(*run(case, (q, k, v)))
    k[:] = -math.inf
    v[:] = math.inf
    o, lse = run(case, (q, k, v))
    assert (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_number_of_16_bits_comes_through(dtype: str) -> None:
    """With one key o is v, bit by bit, whatever v is."""
    v = np.arange(1 << 16, dtype=np.uint16).view(ELEMENTS[dtype].dtype).reshape(64, 1, 1, 1024)
    case = Case(dtype, 64, 1, 1, head_dim_v=1024)
    o, _ = run(case, (*case.inputs()[:2], v))
    o, v = o.astype(np.float32), v.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(o), np.isnan(v))
    same = ~np.isnan(v)
    np.testing.assert_array_equal(o[same] + 0, v[same] + 0)  # -0 may become 0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_rounds_to_nearest_even(dtype: str) -> None:
    eps = float(ml_dtypes.finfo(ELEMENTS[dtype].dtype).eps)
    case = Case(dtype, q_len=1, kv_len=2, head_dim_v=2, scale=0.0)  # o is the mean of v
    q, k, v = case.inputs()
    v[0, :, 0] = [[1, 1 + eps], [1 + eps, 1 + 2 * eps]]
    o, _ = run(case, (q, k, v))
    assert o.astype(float).ravel().tolist() == [1, 1 + 2 * eps]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "ulps"), [("exp", 1.0), ("expm1", 1.5), ("tanh", 3.0)])
def test_functions(name: str, ulps: float, dtype: str) -> None:
    function, numpy = getattr(lanes, name), getattr(np, name)

    @njit
    def apply(x: Any, y: Any) -> None:
        for i in range(0, x.size, lanes.BYTES // x.itemsize):
            lanes.store(y, i, function(lanes.load(x, i)))

    tiny = 80.0 if dtype == "float32" else 700.0
    ends = [-math.inf, 0.0, math.nan, -1e4] + ([30.0, math.inf] if name == "tanh" else [])
    x = np.concatenate([np.linspace(-tiny, 0, 50_000), -np.geomspace(1e-30, 1, 15_000), np.resize(ends, 536)]).astype(dtype)
    y = np.full_like(x, math.nan)
    apply(x, y)
    exact = numpy(x.astype(np.longdouble))
    assert (np.isnan(x) == np.isnan(y)).all()
    assert np.nanmax(np.abs(y - exact) / np.spacing(np.maximum(np.abs(exact), np.finfo(dtype).tiny).astype(dtype))) <= ulps
    assert (y[x == 0] == numpy(0.0)).all() and (y[x == -math.inf] == numpy(-math.inf)).all()


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("sink", [-math.inf, math.inf, math.nan, 3e38, -100.0])
def test_extreme_sinks(sink: float, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(dtype, 1, 100, 70, 2, 1, causal=True, sinks=True)
    monkeypatch.setattr(Case, "sink_logits", lambda self: np.array([0.5, sink], np.float32))
    expect(*case.inputs(), **case.options).check(*run(case))
    if sink == -math.inf:
        with_sinks, without = run(case), run(dataclasses.replace(case, sinks=False))
        np.testing.assert_array_equal(with_sinks[0][:, :, 1], without[0][:, :, 1])
        np.testing.assert_array_equal(with_sinks[1][:, 1], without[1][:, 1])


def test_masks_that_differ_by_head_see_the_used_queries() -> None:
    case = Case("fp32", 2, 30, 40, 4, 2, head_dim=8, head_dim_v=8)
    q, k, v = case.inputs()
    used = np.array([20, 30], np.int32)
    options: dict[str, Any] = {"mask": HeadWindow(1, 3), "q_lens": used, "kv_lens": np.array([33, 40], np.int32)}
    o, lse = rawattn.attention(q, k, v, return_lse=True, **options)
    expect(q, k, v, **options).check(o, lse)
    assert (o[0, 20:] == 0).all() and (lse[0, :, 20:] == -math.inf).all()


# ---- scores of one's own -------------------------------------------------------------------------------------------------


class Alibi(Scale):
    """s + slopes[head] (kv - q), and what a batch adds: a function that the loops do not know, though its base is one of them."""

    def __init__(self, slopes: Any) -> None:
        object.__setattr__(self, "slopes", slopes)

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s + self.slopes[head] * (kv - q) + 0.125 * batch * (q > kv)


@settings(max_examples=60)
@given(cases(longest=100, head_dims=(1, 8, 17, 64), sinks=None))
def test_scores_of_ones_own(case: Case) -> None:
    score = Alibi(2.0 ** -np.arange(1, case.heads + 1))
    case = dataclasses.replace(case, softcap=None)
    q, k, v, *cu = case.inputs()
    o, op, options = case.out(), replace(case.op, score=score), {**case.options, "score": score}
    assert CPU.supports(op, this_cpu()) == []
    lse = np.full((*o.shape[:-3], o.shape[-2], o.shape[-3]), np.nan, op.element.lse_dtype)
    CPU.run(op, CpuConfig(tile_q=32, threads=2), q, k, v, o, lse, *cu, sinks=options.get("sinks"))
    expect(q, k, v, *cu, **options).check(o, lse)


def test_loops_are_for_the_functions_that_they_know() -> None:
    class Twice(Softcap):
        def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
            return 2 * super().logit(xp, s, batch, head, q, kv)

    assert [loops.cap_of(Full(), x) for x in (Scale(), Softcap(7.0), Softcap(7.0).constant_time)] == [0.0, 7.0, 7.0]
    assert loops.cap_of(Full(), Twice(7.0)) is None and loops.cap_of(Full(), Alibi([1.0])) is None


# ---- the same bits -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Odd(Option):
    """Every other key of the first half: several runs of keys, written by hand."""

    type: ClassVar[str] = "Odd"
    source: ClassVar[str] = "../tests/host/lists/checkerboard.cuh"
    lists: ClassVar[bool] = True

    def interval(self, q: Any, q_len: int, kv_len: int) -> tuple[Any, Any]:
        return np.zeros_like(q), np.full_like(q, kv_len // 2)

    @staticmethod
    def keep(xp: Any, batch: int, head: int, q: Any, kv: Any, q_len: int, kv_len: int) -> Any:
        return (q + kv + head) % 2 == 0


class Undefined(Odd):
    keep: Any = None  # type: ignore[assignment]


def test_masks_of_several_runs() -> None:
    """Their runs count, not the one that holds all of them; without a definition nothing is computed."""
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 40, 2, 16), dtype=np.float32)
    o, lse = rawattn.attention(q, k, v, mask=Odd(), return_lse=True)
    expect(q, k, v, mask=Odd()).check(o, lse)
    found = rawattn.attention_backward(do, q, k, v, o, lse, mask=Odd())
    wanted = reference.attention_backward(do, q, k, v, mask=Odd())
    for mine, theirs in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"of several runs of keys with a definition .* and Undefined"):
        rawattn.attention(q, k, v, mask=Undefined())
    first, whole = (rawattn.attention(x, k, v, mask=Odd(), invariant=True) for x in (q[:, :1], q))
    assert bits(first) == bits(whole[:, :1])


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_same_bits_whatever_threads_and_units(dtype: str) -> None:
    case = Case(dtype, 2, 150, 330, 6, 2, causal=True, window=(200, 0), softcap=8.0)
    wanted = bits(run(case, config=CpuConfig(threads=1)))
    for config in (
        CpuConfig(threads=2),
        CpuConfig(threads=7, tile_q=16),
        CpuConfig(threads=2, tile_q=50),
        CpuConfig(tile_q=1),
    ):
        assert bits(run(case, config=config)) == wanted, config
    for _ in range(5):
        assert bits(run(case, config=CpuConfig(threads=3, tile_q=32))) == wanted


def test_same_bits_alone_and_in_a_batch() -> None:
    case = Case("fp32", 3, 100, 200, 4, 4, causal=True)
    q, k, v = case.inputs()
    o, lse = run(case, (q, k, v))
    alone = dataclasses.replace(case, batch=1, heads=1, kv_heads=1)
    for b, h in ((0, 0), (2, 3)):
        o_alone, lse_alone = run(alone, (q[b : b + 1, :, h : h + 1], k[b : b + 1, :, h : h + 1], v[b : b + 1, :, h : h + 1]))
        np.testing.assert_array_equal(o_alone[0, :, 0], o[b, :, h])
        np.testing.assert_array_equal(lse_alone[0, 0], lse[b, h])


def test_concurrent_calls() -> None:
    config = CpuConfig(tile_q=16, threads=2)
    different = [
        Case(dtype, 1, 100 + 30 * i, 200, 4, 2, causal=True, seed=i) for i, dtype in enumerate([*ELEMENTS, "fp32", "bf16"])
    ]
    wanted = [bits(run(case, config=config)) for case in different]
    wrong: list[object] = []

    def repeat(case: Case, bits_wanted: list[bytes]) -> None:
        try:
            for _ in range(10):
                if bits(run(case, config=config)) != bits_wanted:
                    wrong.append(case)
        except Exception as error:
            wrong.append(error)

    at_once(repeat, zip(different, wanted, strict=True))
    assert not wrong


def test_loaded_loops_wait_for_no_compilation() -> None:
    """A process that was forked while a thread compiled another kernel holds the lock of compilations for good."""
    case = Case("fp32", 1, 20, 30, 2, 2)
    wanted, found = bits(run(case)), list[list[bytes]]()
    with loops._loading:
        thread = threading.Thread(target=lambda: found.append(bits(run(case))), daemon=True)
        thread.start()
        thread.join(20)
    assert found == [wanted]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forks_compute() -> None:
    """Also where threads of the parent compute: the loops keep no pool and no lock."""
    text = """\
import json, os, threading, warnings, numpy as np, rawattn
from rawattn.cpu.forward import CpuConfig
x, config = np.random.default_rng(0).standard_normal((2, 150, 2, 16), np.float32), CpuConfig(tile_q=32, threads=3)
wanted, done = rawattn.attention(x, x, x, config=config).tobytes(), threading.Event()

def repeat():
    while not done.is_set():
        rawattn.attention(x, x, x, config=config)

thread = threading.Thread(target=repeat)
thread.start()
warnings.simplefilter("ignore")  # Python's, of forks beside threads
codes = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if rawattn.attention(x, x, x, config=config).tobytes() == wanted else 1)
    codes.append(os.waitpid(child, 0)[1])
done.set()
thread.join()
print(json.dumps(codes))
"""
    assert process(text) == [0, 0, 0]


def test_an_error_ends_the_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    def fail(*unit: object) -> None:
        done.append(unit)
        raise ZeroDivisionError

    monkeypatch.setattr(forward, "_compute", fail)
    with pytest.raises(ZeroDivisionError):
        run(Case("fp32", q_len=1000), config=CpuConfig(tile_q=1, threads=3))
    assert len(done) <= 3


# ---- arrays --------------------------------------------------------------------------------------------------------------


def test_arrays_of_every_kind() -> None:
    """Read-only, unaligned_reason, and expanded arrays are read in place."""
    case = Case("fp32", 2, 20, 30, 2, 2)
    q, k, v = case.inputs()
    wanted = bits(run(case, (q, k, v)))
    k.flags.writeable = False
    memory = np.zeros(v.nbytes + 1, np.uint8)
    unaligned_reason = memory[1:].view(np.float32).reshape(v.shape)
    unaligned_reason[...] = v
    assert not unaligned_reason.flags.aligned
    assert bits(run(case, (q, k, unaligned_reason))) == wanted
    expanded = [np.broadcast_to(x[:1, :, :1], x.shape) for x in (q, k, v)]
    assert bits(run(case, tuple(expanded))) == bits(run(case, tuple(x.copy() for x in expanded)))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("ends", [[1, 5, 10], [0, 6, 5], [0, 5, 11]])
def test_wrong_cu_seqlens(ends: list[int], which: int) -> None:
    case = Case("fp32", lengths=((4, 4), (6, 6)))
    inputs = list(case.inputs())
    inputs[3 + which] = np.array(ends, np.int32)
    with pytest.raises(ProblemError, match=rf"cu_seqlens_{'kv' if which else 'q'} is \[.*\]; it must start with 0"):
        run(case, tuple(inputs))


# ---- the tiling ------------------------------------------------------------------------------------------------------------


def test_it_has_the_contract_of_a_kernel() -> None:
    """The members that choose a kernel and a configuration, with the same arguments; what makes launches is for GPUs."""
    for member in ("runs_on", "supports", "prefers", "layout_reason", "legal", "candidates", "cost", "tuning_shapes", "is_tried"):
        found, wanted = (list(inspect.signature(getattr(each, member)).parameters) for each in (Cpu, Kernel))
        assert found == wanted, member
    assert set(Kernel.__annotations__) - {"needs"} <= set(dir(Cpu))  # the GPUs that a kernel is for


def test_supports() -> None:
    op, device = Case("fp32").op, this_cpu()
    assert CPU.supports(op, device) == []
    assert "on H200" in str(CPU.supports(op, TYPICAL["sm_90a"]))
    assert "head_dim_v is 1025" in str(CPU.supports(Case("fp32", head_dim_v=1025).op, device))
    assert "Option has none" in str(CPU.supports(replace(op, score=Option()), device))


def test_legal() -> None:
    op, device = Case("fp32").op, this_cpu()
    assert all(CPU.legal(c, op, device) is None for c in CPU.candidates(op, device))
    for name in ("tile_q", "tile_kv", "threads"):
        for value in (0, -1, 5000, 1.5):
            assert f"{name} is {value}" in str(CPU.legal(CpuConfig(**{name: value}), op, device))


def best(case: Case, cores: int) -> CpuConfig:
    device = Device("CPU", "cpu", cores, 0, 0)
    return min(CPU.candidates(case.op, device), key=lambda c: CPU.cost(c, case.op, device))


def test_choice() -> None:
    """Threads where they pay, and smaller units where there are more cores than units."""
    assert best(Case("fp32", 1, 8, 8, 2, 2), 64).threads == 1
    assert best(Case("fp32", 1, 2048, 2048, 8, 8), 2) == CpuConfig(512, 96, 2)
    many = best(Case("fp32", 1, 4096, 4096), 32)
    assert many.threads > 8 and many.tile_q < 256
    nothing, device = Case(lengths=()).op, this_cpu()
    assert all(CPU.cost(config, nothing, device) >= 0 for config in CPU.candidates(nothing, device))


# ---- through the API -----------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(cases(layouts=("contiguous", "heads_first", "packed", "expanded"), longest=50))
def test_torch_tensors(case: Case) -> None:
    inputs = case.inputs("torch")
    o, lse = attend(case, *inputs)
    assert o.dtype == inputs[0].dtype and lse.dtype == (torch.float64 if case.dtype == "fp64" else torch.float32)
    expect(*inputs, **case.options).check(o, lse)
    np.testing.assert_array_equal(np.asarray(o.double()), attend(case, *case.inputs())[0].astype(np.float64))


def test_kept_calls_hold_no_tensor() -> None:
    """A call with the same tensors is kept, and moved to others that lie so; it keeps none of them alive."""
    first, second = ([torch.randn(2, 30, 4, 16) for _ in range(3)] for _ in range(2))
    wanted = [rawattn.attention(*(x.numpy() for x in own), causal=True) for own in (first, second)]
    for _ in range(2):
        for own, each in zip((first, second), wanted, strict=True):
            np.testing.assert_array_equal(rawattn.attention(*own, causal=True).numpy(), each)
    first[0].fill_(0.5)  # the same memory, other numbers
    other = rawattn.attention(*(x.numpy() for x in first), causal=True)
    np.testing.assert_array_equal(rawattn.attention(*first, causal=True).numpy(), other)
    gone = [weakref.ref(x) for x in first]
    del first, own
    assert [x() for x in gone] == [None] * 3


def test_out_is_written_in_place() -> None:
    case = Case("fp32", 2, 20, 30, 4, 2, layout="heads_first", head_dim_v=8)
    inputs, out = case.inputs(), case.out()
    assert rawattn.attention(*inputs, out=out) is out
    np.testing.assert_array_equal(out, rawattn.attention(*inputs))


# ---- in processes of their own -------------------------------------------------------------------------------------------

LOAD = """\
import json, time, warnings
import numba  # its import is not the cache's time
from rawattn.cpu import loops
from rawattn.variant.element import FP32
with warnings.catch_warnings(record=True) as caught:
    start = time.thread_time()
    cached = loops.load(FP32).cached
    print(json.dumps([cached, time.thread_time() - start, [str(w.message) for w in caught]]))
"""

STOPPED = """\
from numba.core import compiler

class Stop(BaseException):
    pass

def stop(*given, **named):
    raise Stop

compiler.compile_extra = stop  # what comes after the cache was asked
""" + LOAD.replace(
    "cached = loops.load(FP32).cached",
    """try:
        loops.load(FP32)
        cached = True
    except Stop:
        cached = False""",
)


def process(text: str, cache: pathlib.Path | str | None = None) -> Any:
    """Runs the program and returns what it prints at last, as JSON."""
    environment = {**os.environ, **({} if cache is None else {"RAWATTN_CACHE": str(cache)})}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_first_and_later_compilations(tmp_path: pathlib.Path) -> None:
    """Seconds that the calling thread ran: neither other processes nor the idle threads of a library lengthen them. A damaged
    entry is made anew, and nothing else in its folder is touched."""
    cached, seconds, warned = process(LOAD, tmp_path)
    assert not cached and seconds < 15 and not warned
    cached, seconds, warned = process(LOAD, tmp_path)
    assert cached and seconds < 1 and not warned
    (entry,) = tmp_path.glob("numba/**/*.nbc")
    entry.write_bytes(entry.read_bytes()[:1000])
    (other := entry.with_name("other")).touch()
    assert not process(LOAD, tmp_path)[0]
    assert process(LOAD, tmp_path)[0] and other.exists()


def test_cache_folder_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    """One warning, however many kernels are compiled."""
    (tmp_path / "file").touch()
    twice = STOPPED.replace("import FP32", "import FP32, FP64").replace(
        "    try:\n", "    try:\n        loops.load(FP64)\n    except Stop:\n        pass\n    try:\n"
    )
    cached, _, warned = process(twice, tmp_path / "file" / "folder")
    assert not cached and len(warned) == 1 and "Not a directory" in warned[0] and "RAWATTN_CACHE" in warned[0]


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.file,)


def test_planted_index_is_not_read(tmp_path: pathlib.Path) -> None:
    """Numba's index is a pickle: in a folder that others may write it would run their code, as it does in one that is ours.
    Folders are made for their owner alone."""
    kept, marker = tmp_path / "cache", tmp_path / "marker"
    process(f"import os; os.umask(0)\n{LOAD}", kept)
    (index,) = kept.glob("numba/**/*.nbi")
    assert {folder.stat().st_mode & 0o777 for folder in list(index.parents)[1:4]} == {0o700}
    assert process(STOPPED, kept)[0], "nothing is compiled where the index is right"
    with open(index, "rb") as file:
        version = pickle.load(file)
    index.write_bytes(pickle.dumps(version) + pickle.dumps(Planted(marker)))
    for folder in (kept, kept / "numba", index.parents[1]):
        folder.chmod(0o777)
        cached, _, warned = process(STOPPED, kept)
        folder.chmod(0o700)
        assert not cached and not marker.exists() and len(warned) == 1 and f"chmod go-w {folder}" in warned[0]
    process(STOPPED, kept)
    assert marker.exists(), "the plant does what it is for"


def test_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Numba raises when it cannot save; the kernel is compiled all the same."""
    given: list[object] = []

    def compile(name: str, number: str, storage: str, folder: pathlib.Path | None) -> Any:
        given.append(folder)
        if folder is not None:
            raise OSError(28, "No space left on device")
        return types.SimpleNamespace(stats=types.SimpleNamespace(cache_hits=0))

    monkeypatch.setattr(lanes, "compile", compile)
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path))
    cache.warned.clear()
    with pytest.warns(cache.CacheWarning, match="No space left on device"):
        assert not loops._load.__wrapped__("backward", "float32", "float32").cached
    assert given == [tmp_path / "numba" / f"backward-float32-{lanes.MACHINE}", None]


def test_one_process_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Another that needs the same kernel waits until the first has kept it."""
    made: list[str] = []
    monkeypatch.setattr(lanes, "compile", lambda name, *given: made.append(name))
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path))
    with sole_process(cache.private_folder("numba", f"attend-float32-{lanes.MACHINE}"), "00"):
        second = threading.Thread(target=loops._compile, args=("attend", "float32", "float32"))
        second.start()
        second.join(0.3)
        assert second.is_alive() and not made
    second.join()
    assert made == ["attend"]


TORCH = """\
import json, time, torch, rawattn
q, k, v = (torch.randn(1, 8, 1024, 64) for _ in range(3))
ours = [x.transpose(1, 2) for x in (q, k, v)]

def seconds():
    times = []
    for _ in range(15):
        start = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(q, k, v)
        times.append(time.perf_counter() - start)
    return min(times)

torch.nn.functional.scaled_dot_product_attention(q, k, v)
before = seconds()
for _ in range(3):
    rawattn.attention(*ours)
print(json.dumps(seconds() / before))
"""


def test_torch_is_not_slower_afterwards() -> None:
    """A pool of threads that outlives a call can make it several times slower. The best of some runs: others run here too."""
    ratios = []
    for _ in range(4):
        ratios.append(process(TORCH))
        if ratios[-1] < 1.5:
            return
    raise AssertionError(ratios)


def test_numba_is_imported_for_a_call_only() -> None:
    text = "import json, sys, rawattn; print(json.dumps([m for m in ('numba', 'llvmlite', 'hypothesis') if m in sys.modules]))"
    assert process(text) == []


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMBA_DISABLE_JIT leaves nothing that the loops could be made of: an error says so."""
    monkeypatch.setattr(lanes.numba.config, "DISABLE_JIT", 1)
    with pytest.raises(UnsupportedError, match=r"NUMBA_DISABLE_JIT is set, .*; unset it"):
        loops._compile("attend", "float32", "float32")
