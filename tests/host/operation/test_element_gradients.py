"""Gradients of arrays that scores captured: on the CPU, by autograd, what is refused, and the kernels, thread by thread."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import pathlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, reference
from rawattn.driver.device import TYPICAL
from rawattn.kernel.render import FOLDER
from rawattn.operation import Backward, from_json
from rawattn.runtime.select import select
from rawattn.testing import Case
from rawattn.trace.gradients import by_elements
from rawattn.variant.element import BF16
from rawattn.variant.gather import EXACT_WORDS
from rawattn.variant.mask import Causal
from tests import emulator, zoo
from tests.element_gradients import expect, floats
from tests.emulator import gpu
from tests.operations import forward, replace
from tests.traced import function

Array = npt.NDArray[Any]
WITH_FLOATS = [maker for maker in zoo.SCORES if floats(maker(np.random.default_rng(0), 9, 9))]


def every_way(n: int, m: int, heads: int, batch: int, dtype: Any, seed: int = 0) -> tuple[Any, tuple[Array, ...]]:
    """A score that reads arrays in every way in which gradients are summed, and these arrays. One of them is read three times."""
    rng = np.random.default_rng(seed)
    shapes: tuple[tuple[int, ...], ...] = ((heads,), (batch, heads, max(n, m)), (heads, n, m), (heads, n + m), ())
    slopes, gate, bias, table, cap = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    cap = np.asarray(abs(cap) + 3, dtype)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        more = gate[b, h, q] - gate[b, h, kv] + bias[h, q, kv] + table[h, kv - q + n - 1] * gate[b, h, q]
        return cap * np.tanh(s * slopes[h] / 4) + more

    return score, (slopes, gate, bias, table, cap)


def make(
    rng: np.random.Generator, n: int, m: int, batch: int = 2, heads: int = 2, kv_heads: int = 1, dtype: Any = np.float64
) -> list[Array]:  # fmt: skip
    """do, q, k and v."""
    return [
        rng.standard_normal((batch, rows, h, 8)).astype(dtype)
        for rows, h in ((n, heads), (n, heads), (m, kv_heads), (m, kv_heads))
    ]


def found_and_expected(do: Array, q: Array, k: Array, v: Array, wrt: Any, dlse: Any = None, **options: Any) -> Any:
    o, lse = rawattn.attention(q, k, v, **options, return_lse=True)
    found = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, wrt=wrt, **options)
    del options["sinks"]
    return found[-len(wrt) :], expect(do, q, k, v, o, lse, wrt, dlse=dlse, **options)


@pytest.mark.parametrize("maker", WITH_FLOATS, ids=lambda maker: maker.__name__)
def test_zoo(maker: Any) -> None:
    """On the CPU, and the reference by differences."""
    rng = np.random.default_rng(1)
    n, m = 21, 29
    function = maker(rng, n, m)
    wrt = floats(function)
    do, q, k, v = make(rng, n, m)
    for x in wrt:  # differences need more than float32
        assert x.dtype == np.float32
    found, expected = found_and_expected(do, q, k, v, wrt, score=function, causal=True, sinks=np.array([0.3, -0.2]))
    expected.check(found)
    exact = reference.attention_backward(do, q, k, v, score=function, causal=True, wrt=wrt)[3:]
    for x, gradient in zip(wrt, exact, strict=True):
        place, losses = tuple(int(rng.integers(0, size)) for size in x.shape), []
        held, step = x[place], np.float32(2.0**-7)
        for sign in (1, -1):
            x[place] = held + sign * step
            losses.append((reference.attention(q, k, v, score=function, causal=True) * do).sum())
        width = float(np.float64(held + step) - np.float64(held - step))
        x[place] = held
        np.testing.assert_allclose(gradient[place], (losses[0] - losses[1]) / width, rtol=2e-2, atol=2e-3)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_cpu(data: Any) -> None:
    """Any lengths, with 0 among them, masks, grouped heads, positions, dropout, packed sequences and formats."""
    draw = data.draw
    n, m, kv_heads = draw(st.integers(0, 40)), draw(st.integers(0, 40)), draw(st.sampled_from([1, 2]))
    heads, packed, dtype = (
        kv_heads * draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
        draw(st.sampled_from([np.float32, np.float64])),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    options: dict[str, Any] = {"causal": draw(st.booleans()), "dropout": draw(st.sampled_from([0.0, 0.3])), "seed": 7}
    if draw(st.booleans()):
        doc = np.arange(200, dtype=np.int32) // 11
        options |= {"causal": False, "mask": lambda q, kv: doc[q] == doc[kv]}
    if not packed and draw(st.booleans()):
        options |= {"q_offset": 5, "kv_offset": 3}
    do, q, k, v = make(rng, n, m, 2, heads, kv_heads, dtype)
    score, wrt = every_way(max(n, 1), max(m, 1), heads, 2, draw(st.sampled_from([np.float32, np.float64])))
    if packed:
        do, q, k, v = (x.reshape(-1, *x.shape[2:]) for x in (do, q, k, v))
        cut = draw(st.integers(0, 2 * n)), draw(st.integers(0, 2 * m))
        starts = [np.array([0, each, 2 * length], np.int32) for each, length in zip(cut, (n, m), strict=True)]
        o, lse = rawattn.attention_varlen(q, k, v, *starts, score=score, return_lse=True, **options)
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True))
    else:
        o, lse = rawattn.attention(q, k, v, score=score, return_lse=True, **options)
    dlse = rng.standard_normal(lse.shape).astype(dtype)
    found = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, score=score, wrt=wrt, **options)
    expect(do, q, k, v, o, lse, wrt, dlse=dlse, score=score, **options).check(found[3:])
    again = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, score=score, wrt=wrt[::-1], **options)
    assert all(np.array_equal(a, b) for a, b in zip(found[3:], again[:2:-1], strict=True)), "in the order of wrt, the same bits"
    plain = rawattn.attention_backward(do, q, k, v, o, lse, dlse=dlse, score=score, **options)
    assert all(np.array_equal(a, b) for a, b in zip(found[:3], plain, strict=True))


def test_formats_and_axes() -> None:
    """An array of 16 bits, one whose axis is expanded, and elements that nothing reads."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    do, q, k, v = make(rng, 12, 12)
    narrow, wide = rng.standard_normal((2, 30)).astype(ml_dtypes.bfloat16), np.broadcast_to(rng.standard_normal(12), (2, 12))
    half = rng.standard_normal(()).astype(np.float16)

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (s + narrow[h, q + 3] + wide[b, kv]) * half if kv <= q else s

    o, lse = rawattn.attention(q, k, v, score=score, return_lse=True)
    wrt = narrow, wide, half
    found = rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=wrt)[3:]
    assert [(x.dtype, x.shape) for x in found] == [(x.dtype, x.shape) for x in wrt]
    expect(do, q, k, v, o, lse, wrt, score=score).check(found)
    assert not found[0][:, :3].any() and not found[0][:, 15:].any()


def test_wrong_wrt() -> None:
    rng = np.random.default_rng(0)
    do, q, k, v = make(rng, 5, 5)
    score, (slopes, *_) = every_way(5, 5, 2, 2, np.float64)
    doc, kept = np.zeros(5, np.int32), rng.random(5).astype(np.float32)
    mask = lambda q, kv: kept[q] < 2  # noqa: E731
    o, lse = rawattn.attention(q, k, v, score=score, mask=mask, return_lse=True)

    def ask(wrt: Any, **options: Any) -> Any:
        return rawattn.attention_backward(do, q, k, v, o, lse, mask=mask, wrt=wrt, **{"score": score, **options})

    with pytest.raises(ProblemError, match=r"wrt\[1\] is none of the arrays that score captured; it captured .*slopes"):
        ask((slopes, kept))
    with pytest.raises(ProblemError, match=r"wrt\[0\] is none of the arrays that score captured; it captured no arrays"):
        ask((slopes,), score=None)
    with pytest.raises(ProblemError, match=r"wrt is a ndarray; it must be a tuple of arrays"):
        ask(slopes)
    with pytest.raises(ProblemError, match=r"wrt\[1\] stands in wrt twice"):
        ask((slopes, slopes))
    with pytest.raises(ProblemError, match=r"wrt\[0\] is of int32; only floats have gradients"):
        ask((doc,), score=lambda s, q: s + doc[q])
    found = ask((slopes[:],))  # another object for the same memory
    assert np.array_equal(found[3], ask((slopes,))[3])


def test_two_arrays_in_one_place() -> None:
    """Each object that a score captured is one of its own, also where another lies in the same memory."""
    torch = pytest.importorskip("torch")
    q, k, v, do = (torch.randn(1, n, 2, 8, dtype=torch.float64) for n in (5, 7, 7, 5))
    x = torch.randn(2, dtype=torch.float64)
    y = x.view_as(x)
    score = lambda s, b, h, q, kv: s + x[h] * q + y[h] * y[h] * kv  # noqa: E731
    o, lse = rawattn.attention(q, k, v, score=score, return_lse=True)
    dx, dy = (rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(each,))[-1] for each in (x, y))
    both = rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(x, y))[-2:]
    assert torch.equal(both[0], dx) and torch.equal(both[1], dy) and not torch.allclose(dx, dy)
    leaves = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    found = rawattn.attention(q, k, v, score=lambda s, b, h, q, kv: s + leaves[0][h] * q + leaves[1][h] * leaves[1][h] * kv)
    for own, wanted in zip((dx, dy), torch.autograd.grad((found * do).sum(), leaves), strict=True):
        torch.testing.assert_close(own, wanted)
    with pytest.raises(ProblemError, match=r"wrt\[0\] lies where 2 of the captured arrays lie; give the object that is meant"):
        rawattn.attention_backward(do, q, k, v, o, lse, score=score, wrt=(x.view_as(x),))


def test_a_graph_of_captured_tensors_alone() -> None:
    """create_graph=True, where nothing but what was captured requires grad."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    bias = torch.randn(5, 5, requires_grad=True)
    wanted = torch.autograd.grad(rawattn.attention(q, k, v, bias=bias).sum(), bias)
    found = torch.autograd.grad(rawattn.attention(q, k, v, bias=bias).sum(), bias, create_graph=True)
    torch.testing.assert_close(found[0].detach(), wanted[0])


def test_a_mapped_array_alone_is_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k, v, many = (torch.randn(1, 5, 2, 8), *torch.randn(2, 1, 5, 2, 8), torch.randn(3, 5, 5))
    with pytest.raises(ProblemError, match=r"is mapped by torch\.vmap, and neither q, k nor v is"):
        torch.vmap(lambda bias: rawattn.attention(q, k, v, bias=bias))(many)


def test_operation() -> None:
    """A plan, an explanation and text have the gradients, too."""
    rng = np.random.default_rng(0)
    do, q, k, v = make(rng, 6, 7)
    slopes, bias = rng.random(2), rng.standard_normal((2, 1, 6, 7))
    o, lse = rawattn.attention(q, k, v, alibi=slopes, bias=bias, return_lse=True)
    given = do, q, k, v, o, lse
    plan = rawattn.plan_backward(*given, alibi=slopes, bias=bias, wrt=(bias, slopes))
    assert isinstance(plan.op, Backward) and [x.shape for x in plan.op.outputs[3:]] == [bias.shape, slopes.shape]
    assert from_json(json.loads(json.dumps(plan.op.to_json()))) == plan.op
    wanted = rawattn.attention_backward(*given, alibi=slopes, bias=bias, wrt=(bias, slopes))
    captured = {each.name: x for each, x in zip(plan.op.captured, (bias, slopes), strict=True)}
    if [each.shape for each in plan.op.captured] != [bias.shape, slopes.shape]:
        captured = dict(zip(captured, (slopes, bias), strict=True))
    for a, b in zip(plan.run(*given, **captured), wanted, strict=True):
        assert np.array_equal(a, b)
    assert ", d" in str(rawattn.explain_backward(*given, alibi=slopes, bias=bias, wrt=(bias,)).op)
    out = tuple(np.full_like(x, np.nan) for x in wanted)
    rawattn.attention_backward(*given, alibi=slopes, bias=bias, wrt=(bias, slopes), out=out)
    assert all(np.array_equal(a, b) for a, b in zip(out, wanted, strict=True))


# ---- torch


def test_gradcheck() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    _, arrays = every_way(3, 4, 2, 2, np.float64)
    q, k, v = (torch.randn(2, n, h, 4, dtype=torch.float64, requires_grad=True) for n, h in ((3, 2), (4, 1), (4, 1)))
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays]

    def f(q: Any, k: Any, v: Any, *leaves: Any) -> Any:
        slopes, gate, bias, table, cap = leaves

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            more = gate[b, h, q] - gate[b, h, kv] + bias[h, q, kv] + table[h, kv - q + 2] * gate[b, h, q]
            return cap * torch.tanh(s * slopes[h] / 4) + more

        return rawattn.attention(q, k, v, score=score, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(f, (q, k, v, *leaves))
    assert torch.autograd.gradcheck(lambda *own: f(q.detach(), k.detach(), v.detach(), *own)[1], leaves), "by lse alone"
    slopes, bias = (
        torch.rand(2, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 1, 3, 4, dtype=torch.float64, requires_grad=True),
    )
    shorthand = lambda q, alibi, bias: rawattn.attention(q, k, v, alibi=alibi, bias=bias, softcap=5.0)  # noqa: E731
    assert torch.autograd.gradcheck(shorthand, (q, slopes, bias))


def test_autograd() -> None:
    """Tensors that require grad get a gradient, others none; one that is read twice gets the sum; a step is followed."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    slopes, table = torch.randn(2, requires_grad=True), torch.randn(2, 17)

    def loss() -> Any:
        return rawattn.attention(q, k, v, score=lambda s, h, q, kv: s + slopes[h] * table[h, kv - q + 8]).square().sum()

    loss().backward()
    first = slopes.grad.clone()
    assert first.any() and table.grad is None
    loss().backward()
    assert torch.equal(slopes.grad, 2 * first)
    table.requires_grad_()
    found = torch.autograd.grad(loss(), (slopes, table))
    assert torch.equal(found[0], first) and found[1].any()
    with torch.no_grad():
        assert not loss().requires_grad
    lse = rawattn.attention(q, k, v, score=lambda s, h: s * slopes[h], return_lse=True)[1]
    assert torch.autograd.grad(lse.sum(), slopes)[0].any()
    unused = rawattn.attention(q, k, v, score=lambda s, h: torch.where(slopes[h] > 0, s, 2 * s)).sum()
    assert not torch.autograd.grad(unused, slopes)[0].any(), "a condition has no gradient"


def test_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    reach = torch.tensor([3.0, 4.0], requires_grad=True)
    with pytest.raises(ProblemError, match="reach, which mask captured, requires grad, and a mask has no gradient"):
        rawattn.attention(q, k, v, mask=lambda h, q, kv: q - kv < reach[h])
    o = rawattn.attention(q, k, v, score=lambda s, h: s * reach[h])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        with torch.no_grad():
            reach += 1
        o.sum().backward()
    detached = reach.detach()
    plan = rawattn.plan(q, k, v, score=lambda s, h: s * detached[h])
    with pytest.raises(ProblemError, match="plans, calls over caches and merges have no backward"):
        plan.run(q, k, v, reach)


# ---- kernels


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Functions that add numbers to an exact sum and round it."""
    entries = "\n".join(
        f"""
extern "C" void add_{name}({ctype} x, u64* sum) {{ ExactSum<{ctype}>::add(sum, x); }}
extern "C" {ctype} rounded_{name}(const u64* sum) {{ return ExactSum<{ctype}>::rounded(sum); }}
extern "C" i32 size_{name}() {{ return ExactSum<{ctype}>::size; }}"""
        for name, ctype in (("fp32", "float"), ("fp64", "double"))
    )
    files = {path: (FOLDER / path).read_text() for path in ("tile/exact_sum.cuh", "ptx/base.cuh")}
    return emulator.compiled(
        f'#include "threads.hpp"\n#include "tile/exact_sum.cuh"\n{entries}', files, tmp_path_factory.mktemp("sums")
    )


@pytest.mark.parametrize("number", ["fp32", "fp64"])
def test_exact_sum(number: str, sums: Any) -> None:
    ctype, width = {"fp32": (ctypes.c_float, 32), "fp64": (ctypes.c_double, 64)}[number]
    add, rounded = getattr(sums, f"add_{number}"), getattr(sums, f"rounded_{number}")
    add.argtypes, rounded.restype = [ctype, ctypes.c_void_p], ctype
    assert getattr(sums, f"size_{number}")() == EXACT_WORDS[number]

    def total(numbers: list[float]) -> float:
        memory = np.zeros(EXACT_WORDS[number], np.uint64)
        for x in numbers:
            add(x, memory.ctypes.data)
        return float(rounded(memory.ctypes.data_as(ctypes.c_void_p)))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.floats(width=width, allow_nan=False, allow_infinity=False), max_size=12), st.randoms())
    def check(numbers: list[float], random: Any) -> None:
        found = total(numbers)
        random.shuffle(numbers)
        assert struct.pack("d", total(numbers)) == struct.pack("d", found), "in any order"
        try:
            exact = math.fsum(numbers)
        except OverflowError:
            assume(False)
        exact = float(np.float32(exact)) if number == "fp32" else exact
        unit = abs(float(np.spacing(np.float32(exact)))) if number == "fp32" else math.ulp(exact)
        assert found == exact or abs(found - exact) <= (unit if number == "fp32" else 2 * unit)

    with np.errstate(over="ignore"):
        check()
    assert total([1e30, 1.0, -1e30]) == 1.0 and total([3e38] * 3 + [-3e38] * 3) == 0.0 and total([]) == 0.0
    assert math.isnan(total([1.0, math.nan])) and math.isnan(total([math.inf, -math.inf]))
    assert total([math.inf, 1.0]) == math.inf and total([-math.inf, -1.0, -math.inf]) == -math.inf


NOT_NEEDED = ("attn_bwd_dkdv_simt", "attn_bwd_dq_simt", "attn_bwd", "attn_bwd_sum", "attn_bwd_convert", "attn_bwd_padding")


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """Kernels on the CPU, but for those whose results nothing reads here."""
    kernel = gpu.emulated

    class Nothing:
        def launch(self, blocks: int, args: bytes) -> None:
            return

    def of(launch: Any, number: str, folder: pathlib.Path) -> Any:
        return Nothing() if launch.entry in NOT_NEEDED else kernel(launch, number, folder)

    monkeypatch.setattr(gpu, "emulated", of)
    return lambda: gpu.stand_in(monkeypatch, tmp_path, sm_count=3)


def check_emulated(
    start: Any, kernel: str, case: tuple[int, int, int, int], dtype: Any, packed: bool = False, **options: Any
) -> None:
    """All ways at once, into memory of NaN: emulated against the formula."""
    torch = pytest.importorskip("torch")
    n, m, heads, kv_heads = case
    torch.manual_seed(0)
    do, q, k, v = (torch.randn(2, rows, h, 16).to(dtype) for rows, h in ((n, heads), (n, heads), (m, kv_heads), (m, kv_heads)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    _, arrays = every_way(n + options.get("q_offset", 0), m + options.get("kv_offset", 0), heads, 2, np.float32)
    slopes, gate, bias, table, cap = (torch.from_numpy(x).to(wide) for x in arrays)
    own = kernel == "attn_bwd"  # each sequence has elements of its own, which no sum is needed for
    bias = torch.stack([bias, -bias]) if own else bias[None]
    bias, table, gate = (
        bias.to(torch.bfloat16 if packed or own else wide),
        table.half(),
        gate.transpose(0, 1).contiguous().transpose(0, 1),
    )

    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        place = kv + q if own else kv - q + n - 1  # each pair of a diagonal has another element, or all have one
        more = gate[b, h, q] - gate[b, h, kv] + bias[b if own else 0, h, q, kv] + table[h, place] * gate[b, h, q]
        return cap * torch.tanh(s * slopes[h] / 4) + more

    call: Any = rawattn.attention
    if packed:
        do, q, k, v = (x.flatten(0, 1) for x in (do, q, k, v))
        starts = [torch.tensor([0, n // 3, 2 * n - 4]).int(), torch.tensor([0, m, 2 * m]).int()]
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), starts, strict=True))
        call = rawattn.attention_varlen
    o, lse = call(q, k, v, score=score, return_lse=True, **options)
    wrt = slopes, gate, bias, table, cap
    dlse = torch.randn_like(lse)
    if packed:
        dlse[:, 2 * n - 4 :] = 0
    expected = expect(do, q, k, v, o, lse, wrt, dlse=dlse, score=score, **options)
    if "q_lens" in options:
        used = dataclasses.replace(
            Case(batch=2, q_len=n, kv_len=m), lens=tuple(tuple(options[x].tolist()) for x in ("q_lens", "kv_lens"))
        )
        used.poison((do, q, o), (k, v), (lse, dlse))
    start()
    seed = options.pop("seed", None)
    options |= {"dlse": dlse, "score": score, "seed": seed}
    around = [torch.full((x.numel() + 256,), math.nan, dtype=x.dtype) for x in wrt]
    out = (None, None, None, *[each[128:-128].view(x.shape) for each, x in zip(around, wrt, strict=True)])
    expected.check(rawattn.attention_backward(do, q, k, v, o, lse, wrt=wrt, kernel=kernel, out=out, **options)[3:])
    assert all(each[:128].isnan().all() and each[-128:].isnan().all() for each in around), "nothing beside the elements"


def test_simt_emulated(emulated: Any) -> None:
    import torch

    doc = torch.arange(60, dtype=torch.int32) // 9
    options = {"mask": lambda q, kv: doc[q] <= doc[kv], "dropout": 0.2, "seed": 3, "q_offset": 3, "kv_offset": 2}
    check_emulated(emulated, "attn_bwd_simt", (34, 43, 2, 1), torch.float32, **options)


@pytest.mark.slow
def test_packed_emulated(emulated: Any) -> None:
    import torch

    check_emulated(emulated, "attn_bwd_simt", (34, 35, 2, 1), torch.float64, packed=True, causal=True)


def test_behind_tensor_cores_emulated(emulated: Any) -> None:
    """The scratch memory of attn_bwd has blocks of other sizes."""
    import torch

    check_emulated(emulated, "attn_bwd", (20, 66, 2, 1), torch.bfloat16, window=(20, 50), scale=-0.3, q_offset=4, kv_offset=1)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["attn_bwd_simt", "attn_bwd_mma", "attn_bwd"])
def test_rows_in_use_emulated(emulated: Any, kernel: str) -> None:
    """Elements that only other rows read get 0, and NaN that is there reaches none."""
    import torch

    lens = {"q_lens": torch.tensor([17, 34]).int(), "kv_lens": torch.tensor([43, 5]).int()}
    dtype = torch.bfloat16 if kernel == "attn_bwd" else torch.float32
    check_emulated(emulated, kernel, (34, 43, 2, 1), dtype, causal=True, **lens)


def test_launches() -> None:
    """Each element of an array over pairs belongs to one block, which takes all sequences and heads that share it; where none do,
    there are no sums, and nothing is cleared; where indices are clipped, or two elements are read, sums are exact."""
    device, dims = TYPICAL["sm_90a"], (2, 100, 130, 4, 4, 64, 64)
    four, three, pair = (np.zeros(shape, np.float32) for shape in ((2, 4, 100, 130), (4, 100, 130), (130, 130)))
    for score, shared, blocks in (
        (lambda s, b, h, q, kv: s + four[b, h, q, kv], (1, 1), 2 * 2 * 4),
        (lambda s, b, h, q, kv: s + three[h, q, kv], (2, 1), 2 * 4),
        (lambda s, b, h, q, kv: s + three[h // 2, q, kv], (2, 4), 2),
        (lambda s, b, h, q, kv: s + pair[q, kv], (2, 4), 2),
        (lambda s, b, h, q, kv: s + pair[q, kv] * pair[kv, q], None, 2 * 2 * 4),
        (lambda s, b, h, q, kv: s + four[h, b, q, kv], (1, 4), 2 * 2),  # the first index is clipped
        (lambda s, b, h, q, kv: s + three[h, q + 1, kv], None, 2 * 2 * 4),
    ):
        option, _ = function(score, "score", (2, 4, 100, 130))
        op = Backward(replace(forward(BF16, *dims, scale=0.1), score=option), wrt=("score_0",))
        selection = select(op, device, "attn_bwd")
        launches = selection.kernel.lower(op, selection.config, device).launches
        own = [each for each in launches if each.entry == "attn_bwd_captured_mma"]
        assert len(own) == len(by_elements(option.code)) > 0
        for each in own:
            assert each.grid == blocks
            found = [field.name for field in each.fields if field.name in ("shared_batches", "shared_heads")]
            assert (tuple(each.values[name] for name in found) or None) == shared
            ctype = "u64*" if shared is None else "float*" if shared == (1, 1) else "Number*"
            assert {field.name: field.ctype for field in each.fields}["sums"] == ctype
        assert any(each.entry == "attn_bwd_captured_clear" for each in launches) == (shared != (1, 1))


def test_what_is_cleared_of_elements_written_once() -> None:
    """Nothing, where every element is a pair's that the mask keeps; else all, for some may be nobody's."""
    device, sizes = TYPICAL["sm_90a"], (2, 4, 100, 130)
    whole, longer, one = (np.zeros(shape, np.float32) for shape in (sizes, (2, 4, 100, 131), (4, 100, 130)))
    whole_of = lambda s, b, h, q, kv: s + whole[b, h, q, kv]  # noqa: E731
    for score, fields, is_cleared in (
        (whole_of, {}, False),
        (lambda s, b, h, q, kv: s + one[h, q, kv], {"batch": 1}, False),
        (lambda s, b, h, q, kv: s + longer[b, h, q, kv], {}, True),
        (whole_of, {"mask": Causal()}, True),
        (whole_of, {"q_lens": True}, True),
        (whole_of, {"kv_lens": True}, True),
        (whole_of, {"q_len": 99}, True),
        (whole_of, {"batch": 1}, True),
        (whole_of, {"varlen": True, "total_q": 200, "total_kv": 260}, True),
    ):
        option, _ = function(score, "score", sizes)
        op = Backward(replace(forward(BF16, 2, 100, 130, 4, 4, 64, 64, scale=0.1), score=option, **fields), wrt=("score_0",))
        selection = select(op, device)
        program = selection.kernel.lower(op, selection.config, device)
        first, *rest = [each for each in program.launches if each.entry.startswith("attn_bwd_captured")]
        assert [each.entry for each in (first, *rest)] == ["attn_bwd_captured_clear"] * is_cleared + ["attn_bwd_captured_mma"]
        assert not is_cleared or first.values["words"] == math.prod(option.arrays[0].shape)


TRANSPOSED = """
#include "config.cuh"
#include "tile/facts.cuh"
#include "variant/pair_elements.cuh"

struct Smem {};
extern "C" __device__ Facts facts = {0, sizeof(Args), 32, false};

extern "C" __global__ void attn_bwd(const __grid_constant__ Args args) {
    float* const wrong = reinterpret_cast<float*>(args.dk.rows(Rows(args, 0).kv, 0));
    const Rows rows(args, 1);
    const Score score(args, rows, {1, 1, 0, 0});
    const i32 lane = threadIdx.x;
    float count = 1;
    for (i32 q = 0; q < args.q_len; q += 64)
        for (i32 kv = 0; kv < args.kv_len; kv += 16) {
            const i32 q_first = q + lane % 4 * 2, key = kv + lane / 4;
            const auto all = logits_transposed<32, Mask>(score, q_first, key, q ? -64 : 64);
            static_assert(sizeof(all.words) == 64);
            const LogitsTransposed<Score> each = {score, q_first, key};
            for (int i = 0; i < 32; ++i) count += all(float(i), i) != each(float(i), i);
        }
    wrong[lane] = count;
}
"""


def test_elements_of_a_transposed_tile(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Elements that attn_bwd reads before it has a product make the logits that the score makes, also where rows or keys end."""
    torch = pytest.importorskip("torch")
    bias = torch.randn(2, 2, 71, 93).bfloat16()
    q, k, v = (torch.randn(2, rows, 2, 16).bfloat16() for rows in (70, 90, 90))
    score = lambda s, b, h, q, kv: s * 0.5 + bias[b, h, q + 1, kv + 3]  # noqa: E731
    o, lse = rawattn.attention(q, k, v, score=score, return_lse=True)
    real = gpu.emulated

    class Nothing:
        def launch(self, blocks: int, args: bytes) -> None:
            return

    def of(launch: Any, number: str, folder: pathlib.Path) -> Any:
        if launch.entry != "attn_bwd":
            return Nothing()
        return real(launch._replace(source=dataclasses.replace(launch.source, text=TRANSPOSED)), number, folder)

    monkeypatch.setattr(gpu, "emulated", of)
    gpu.stand_in(monkeypatch, tmp_path, sm_count=1)
    dk = rawattn.attention_backward(o, q, k, v, o, lse, score=score, kernel="attn_bwd")[1]
    assert (dk.flatten().view(torch.float32)[:32] == 1).all()
