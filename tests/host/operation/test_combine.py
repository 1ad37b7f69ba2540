"""Results over different keys merged: on the CPU, and by combine.cu, thread by thread."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import ProblemError, UnsupportedError, reference
from rawattn.array import reading
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.combine import COMBINE, CombineConfig
from rawattn.operation import Combine, from_json
from rawattn.runtime.select import select
from rawattn.variant.element import ELEMENTS
from tests.emulator.gpu import stand_in

EPS = {"bf16": 2.0**-8, "fp16": 2.0**-10, "fp32": 1e-6, "fp64": 1e-14}


def make(count: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[tuple[Any, Any]]:
    """Parts with strides of their own, of which some rows have no key and hold NaN."""
    rng, element, found = np.random.default_rng(seed), ELEMENTS[dtype], []
    for _ in range(count):
        o = rng.standard_normal((*shape[:-1], shape[-1] + 4)).astype(element.dtype)[..., : shape[-1]]
        lse = (5 * rng.standard_normal((*shape[:-3], shape[-3], shape[-2]))).astype(element.lse_dtype).swapaxes(-1, -2)
        empty = rng.random(lse.shape) < 0.2
        lse[empty] = -np.inf
        o[np.swapaxes(empty, -1, -2)] = np.nan
        lse[rng.random(lse.shape) < 0.05] = 300
        found.append((o, lse))
    return found


def check(found: tuple[Any, Any], wanted: tuple[Any, Any], dtype: str) -> None:
    o, lse = (np.asarray(x, np.float64) for x in found)
    np.testing.assert_allclose(o, wanted[0], rtol=EPS[dtype], atol=4 * EPS[dtype])
    eps = 1e-6 if dtype != "fp64" else 1e-14
    np.testing.assert_allclose(lse, wanted[1], rtol=eps, atol=eps)  # a sum of two terms of up to 20, which may cancel


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20), st.sampled_from([(2, 3, 4, 8), (5, 2, 7), (0, 2, 4), (1, 1, 1, 1)]), st.sampled_from(tuple(ELEMENTS)),
    st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_reference(count: int, shape: tuple[int, ...], dtype: str, sinks: bool, seed: int) -> None:
    parts, logits = make(count, shape, dtype, seed), None
    if sinks:
        logits = np.resize([0.5, -np.inf, 310.0], shape[-2]).astype(ELEMENTS[dtype].lse_dtype)
    check(rawattn.merge_states(parts, sinks=logits), reference.merge_states(parts, sinks=logits), dtype)


def test_parts_of_attention() -> None:
    """Attention over three runs of keys, merged, is attention over all of them; the sinks are given once."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4, 16), np.float32)
    sinks, out = np.float32([0.5, 1.0, -2.0, 3.0]), np.empty_like(q)
    parts = [rawattn.attention(q, k[:, run], v[:, run], return_lse=True) for run in (slice(4), slice(4, 5), slice(5, None))]
    o, lse = rawattn.merge_states(parts, sinks=sinks, out=out)
    wanted = rawattn.attention(q, k, v, sinks=sinks, return_lse=True)
    assert o is out
    np.testing.assert_allclose(o, wanted[0], atol=1e-6)
    np.testing.assert_allclose(lse, wanted[1], atol=1e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sums(dtype: str) -> None:
    """Parts become sums, whose rows lie apart; others are added to these in place; they are rounded once."""
    parts = [(np.ascontiguousarray(o), lse) for o, lse in make(10, (2, 3, 4, 8), dtype)]
    sums = np.full((2, 9, 4, 8), np.nan, np.float32)[:, 3:6]
    o, lse = rawattn.merge_states(parts[:2], out=sums)
    check((o, lse), reference.merge_states(parts[:2]), "fp32")
    (rounded, _) = rawattn.merge_states([(o, lse)], out=parts[0][0].copy())
    assert rounded.dtype == parts[0][0].dtype and np.array_equal(rounded, o.astype(rounded.dtype))
    for i in range(2, 8, 3):
        o, lse = rawattn.merge_states([(sums, lse), *parts[i : i + 3]], out=sums)
        assert o is sums
    check((o, lse), reference.merge_states(parts[:8]), "fp32")
    sinks = np.float32([0.5, -np.inf, 310.0, 1.0])
    found = rawattn.merge_states([(o, lse), *parts[8:]], sinks=sinks)
    assert found[0].dtype == parts[0][0].dtype
    check(found, reference.merge_states(parts, sinks=sinks), dtype)


def test_one_part_comes_out_as_it_went_in() -> None:
    (part,) = make(1, (5, 2, 7), "bf16")
    o, lse = rawattn.merge_states([part])
    assert np.array_equal(lse, part[1])
    rows = -np.inf != part[1].T
    assert np.array_equal(o[rows], part[0][rows]) and not o[~rows].any()


@pytest.mark.parametrize(("dtype", "shape"), [("bf16", (2, 3, 4, 8)), ("fp32", (5, 2, 7)), ("fp64", (1, 4, 3, 136))])
def test_kernel(dtype: str, shape: tuple[int, ...], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if dtype == "bf16":
        parts = [(torch.from_numpy(o.astype(np.float32)).bfloat16(), torch.from_numpy(lse)) for o, lse in make(16, shape, dtype)]
    else:
        parts = [(torch.from_numpy(o), torch.from_numpy(lse)) for o, lse in make(5, shape, dtype)]
    sinks = torch.tensor([0.5, -np.inf, 310.0, 1.0], dtype=parts[0][1].dtype)[: shape[-2]]
    wanted = reference.merge_states(parts, sinks=sinks)
    stand_in(monkeypatch, tmp_path)
    odd = None if dtype == "bf16" else torch.empty(*shape[:-1], shape[-1] + 2, dtype=parts[0][0].dtype)[..., 1:-1]
    found = rawattn.merge_states(parts, sinks=sinks, out=odd)
    check(tuple(x.double().numpy() for x in found), wanted, dtype)
    if dtype == "bf16":
        sums, lse = torch.full((2, 9, 4, 8), torch.nan)[:, 3:6], torch.full((2, 4, 3), -torch.inf)
        for i in (0, 8):
            o, lse = rawattn.merge_states([(sums, lse), *parts[i : i + 8]], out=sums)
        assert o is sums
        check(tuple(x.double().numpy() for x in (o, lse)), reference.merge_states(parts), "fp32")


@pytest.mark.parametrize(("count", "dtype"), [(17, "bf16"), (31, "fp32"), (133, "bf16")])
def test_many_parts(count: int, dtype: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one launch takes: o is rounded once, out may be a sum or o of the first part, and the first part a sum."""
    torch = pytest.importorskip("torch")
    own = torch.bfloat16 if dtype == "bf16" else None
    made = [(o.astype(ELEMENTS[dtype].lse_dtype), lse) for o, lse in make(count, (2, 3, 4, 8), dtype)]
    parts = [(torch.from_numpy(o).to(own), torch.from_numpy(lse)) for o, lse in made]
    sinks = torch.tensor([0.5, -np.inf, 310.0, 1.0], dtype=parts[0][1].dtype)
    wanted = reference.merge_states(parts, sinks=sinks)
    stand_in(monkeypatch, tmp_path)
    sums = torch.full((2, 3, 4, 8), torch.nan, dtype=parts[0][1].dtype)
    o, lse = rawattn.merge_states(parts, sinks=sinks, out=sums)
    assert o is sums
    check((o.double().numpy(), lse.double().numpy()), wanted, ELEMENTS[dtype].lse_name)
    found = rawattn.merge_states(parts, sinks=sinks)
    same = lambda a, b: a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))  # noqa: E731
    assert same(found[0], sums.to(parts[0][0].dtype)) and same(found[1], lse)
    own_sum = (parts[0][0].to(sums.dtype), parts[0][1])
    assert same(rawattn.merge_states([own_sum, *parts[1:]], sinks=sinks)[0], found[0])
    assert same(rawattn.merge_states(parts, sinks=sinks, out=parts[0][0])[0], found[0]) and same(parts[0][0], found[0])
    with pytest.raises(ProblemError, match=rf"o of part {count - 1} is .* of shape \(1, 3, 4, 8\)"):
        rawattn.merge_states([*parts[:-1], (parts[-1][0][:1], parts[-1][1])])
    with pytest.raises(ProblemError, match=f"out overlaps o_{count - 1} in memory"):
        rawattn.merge_states(parts, out=parts[-1][0])
    op = Combine(ELEMENTS[dtype], count, 2, 3, 4, 8)
    with pytest.raises(UnsupportedError, match=f"there are {count} parts; it takes up to 16"):
        select(op, TYPICAL["sm_90a"])


@pytest.mark.parametrize("arch", ["sm_75", "sm_90a", "sm_120"])
def test_compiles(arch: str) -> None:
    op = Combine(ELEMENTS["bf16"], 3, 2, 100, 8, 128, sinks=True, width=4)
    for each in (op, dataclasses.replace(op, sum=True, to_sum=True, in_place=True)):
        (launch,) = COMBINE.lower(each, CombineConfig(), TYPICAL[arch]).launches
        binary = compiler.compile(launch.source)
        assert not binary.spill_bytes and not binary.advisories


OUT, LSE = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 4, 3), np.float32)
HALF, SUMS, READ_ONLY = OUT.astype(np.float16), OUT.copy(), OUT.copy()
READ_ONLY.flags.writeable = False
WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("none", [], {}, "parts is empty; it must have at least one pair (o, lse)."),
    ("no parts", 3, {}, "parts is 3; it must be pairs (o, lse)."),
    ("no pair", [OUT], {}, "part 0 is ndarray; it must be a pair (o, lse)."),
    ("rank", [(OUT[0, 0], LSE)], {}, "o of part 0 is fp32 of shape (4, 8); it must be bf16, fp16, fp32"),
    ("shape", [(OUT, LSE), (OUT[:1], LSE)], {}, "o of part 1 is fp32 of shape (1, 3, 4, 8); it must be fp32 of shape (2, 3, 4,"),
    ("lse", [(OUT, LSE.swapaxes(1, 2))], {}, "lse of part 0 is fp32 of shape (2, 3, 4); it must be fp32 of shape (2, 4, 3)."),
    ("lse's dtype", [(OUT, LSE.astype(np.float64))], {}, "lse of part 0 is fp64 of shape (2, 4, 3); it must be fp32"),
    ("sinks", [(OUT, LSE)], {"sinks": LSE[0, 0]}, "sinks is fp32 of shape (3,); it must be fp32"),
    ("out", [(OUT, LSE)], {"out": OUT[:]}, "out overlaps o_0 in memory; give an array of its own."),
    ("out's dtype", [(OUT, LSE)], {"out": OUT.astype(np.float16)[:2, :2]}, "out is a numpy fp16 array of shape (2, 2, 4, 8)"),
    ("out's format", [(OUT.astype(np.float64), LSE.astype(np.float64))], {"out": OUT}, "out is fp32; it must be fp64"),
    ("a sum that is second", [(HALF, LSE), (OUT, LSE)], {}, "o of part 1 is fp32 of shape (2, 3, 4, 8); it must be fp16"),
    ("in place", [(READ_ONLY, LSE)], {"out": READ_ONLY}, "out is read-only; give a writable array."),
    ("a part in place", [(SUMS, LSE), (SUMS, LSE)], {"out": SUMS}, "out overlaps o_1 in memory; give an array of its own."),
    ("columns", [(np.zeros((2, 3, 4, 16), np.float32)[..., ::2], LSE)], {}, "o of part 0 has a stride of 2 in its last dimensi"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "options", "message"), [x[1:] for x in WRONG], ids=[x[0] for x in WRONG])
def test_wrong_parts(parts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as error:
        rawattn.merge_states(parts, **options)
    assert message in str(error.value)


def test_autograd_is_refused() -> None:
    torch = pytest.importorskip("torch")
    o, lse = torch.zeros(2, 3, 4, 8, requires_grad=True), torch.zeros(2, 4, 3)
    with pytest.raises(ProblemError, match=r"caches and merges have no backward; .* under torch.no_grad\(\)"):
        rawattn.merge_states([(o, lse)])
    with torch.no_grad():
        assert not rawattn.merge_states([(o, lse)])[0].requires_grad


def test_operation_as_a_value() -> None:
    op = Combine.of_call({"o_0": reading.read(OUT, "o"), "lse_0": reading.read(LSE, "lse")}, {}, ())
    assert from_json(json.loads(json.dumps(op.to_json()))) == op
    assert str(dataclasses.replace(op, sinks=True)) == "Combine fp32 1 parts, batch 2, length 3, heads 4, head_dim 8, sinks"
    assert op.flops == 2 * OUT.size and op.bytes == 2 * 4 * (OUT.size + LSE.size)
    half = reading.read(HALF, "o")
    found = {"o_0": reading.read(OUT, "o"), "lse_0": reading.read(LSE, "lse"), "o_1": half, "lse_1": reading.read(LSE, "lse")}
    op = Combine.of_call(found, {"out": found["o_0"], "in_place": True}, ())
    assert from_json(json.loads(json.dumps(op.to_json()))) == op and op.bytes == 10 * OUT.size + 12 * LSE.size
    assert str(op) == "Combine fp16 2 parts, batch 2, length 3, heads 4, head_dim 8, of a sum, to a sum, in place"
