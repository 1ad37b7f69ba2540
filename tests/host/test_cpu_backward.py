"""The backward on the CPU against the reference, and its promises about bits, threads and memory around the arrays."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import platform
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rawattn import ProblemError, UnsupportedError
from rawattn.cpu import kernels as cpu
from rawattn.testing import Case, cases, expect_backward
from rawattn.variant import Option
from rawattn.variant.element import ELEMENTS
from rawattn.variant.mask import And, Causal, Window
from rawattn.variant.score import Scale, Score
from tests.host.test_cpu import process
from tests.options import SCORES
from tests.threads import at_once

Gradients = dict[str, npt.NDArray[Any]]

LISTED = [
    Case(q_len=200, kv_len=333, heads=4, kv_heads=2),
    Case(q_len=257, kv_len=257, causal=True, head_dim=72, head_dim_v=40, layout="packed", sinks=True),
    Case(q_len=300, kv_len=100, causal=True, sinks=True),  # most queries are before the first key
    Case(q_len=100, kv_len=300, mask=Causal("top_left"), layout="heads_first"),
    Case(q_len=200, kv_len=500, window=(20, 3), heads=3, kv_heads=3, head_dim=33, head_dim_v=1),
    Case(q_len=128, kv_len=400, mask=And(Causal("top_left"), Window(300, 5)), layout="reversed"),
    Case(q_len=200, kv_len=200, softcap=5.0, scale=-1.0, sinks=True),
    Case(q_len=40, kv_len=70, head_dim=300, head_dim_v=1),
    Case(q_len=1, kv_len=700, heads=16, kv_heads=2, causal=True, layout="padded"),
    Case(q_len=60, kv_len=2100, causal=True, head_dim=16, head_dim_v=24),  # the keys of a head are in several units
    Case(lengths=((5, 300), (0, 40), (200, 0), (129, 129), (0, 0), (300, 7)), heads=2, kv_heads=1, causal=True, sinks=True),
    Case(q_len=100, kv_len=90, causal=True, q_offset=40, kv_offset=70, sinks=True),
    Case(batch=0), Case(q_len=0), Case(kv_len=0, sinks=True), Case(lengths=()), Case(lengths=((0, 0),)),
]  # fmt: skip


def run(case: Case, score: Score | None = None, dlse: bool = True, threads: int | None = 2) -> tuple[Gradients, Any]:
    """The gradients by name, from o and lse that the CPU path computed, and what the reference wants of them."""
    q, k, v, *cu = case.inputs()
    op, (do, dlse_given), sinks = case.op, case.output_gradients(), case.sink_logits() if case.sinks else None
    score, spec = score or op.score, op.spec if score is None else dataclasses.replace(op.spec, score=score)
    places = {"mask": spec.placed_mask, "score": spec.placed_score, "scale": op.scale}
    o, lse = case.out(), np.full_like(dlse_given, math.nan)
    config, starts = cpu.CpuConfig(), dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu, strict=False)) | case.used()
    cpu.run_forward(q, k, v, o, lse, **places, sinks=sinks, config=config, **starts)
    found = {name: np.full(x.shape, math.nan, x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if sinks is not None:
        found["dsinks"] = np.full(sinks.shape, math.nan, lse.dtype)
    given = {"dlse": dlse_given if dlse else None, **starts}
    if case.layout != "expanded":
        case.poison((do, q, o), (k, v), (lse, dlse_given))
    cpu.run_backward(do, q, k, v, o, lse, **places, sinks=sinks, threads=threads, **found, **given)
    options = {**case.options, "score": score, **given}
    options.pop("softcap", None)
    return found, lambda: expect_backward(do, q, k, v, **options)


def check(case: Case, score: Score | None = None, dlse: bool = True) -> None:
    found, expected = run(case, score, dlse)
    expected().check(**found)


def bits(found: Gradients) -> list[bytes]:
    return [x.tobytes() for x in found.values()]


@settings(max_examples=60)
@given(cases(longest=150, head_dims=(1, 8, 17, 64, 72), sinks=None, lens=True, scores=SCORES), st.booleans())
def test_reference(case: Case, dlse: bool) -> None:
    check(case, dlse=dlse)


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("case", LISTED, ids=lambda case: case.name)
def test_listed(case: Case, dtype: str) -> None:
    check(dataclasses.replace(case, dtype=dtype))


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_same_bits_whatever_threads(dtype: str) -> None:
    case = Case(dtype, 2, 150, 2100, 4, 2, head_dim=24, head_dim_v=16, causal=True, softcap=8.0, sinks=True)
    assert len(cpu._spans(2100, 8)) > 1
    wanted = bits(run(case, threads=1)[0])
    for threads in (2, 3, 7, None):
        assert bits(run(case, threads=threads)[0]) == wanted, threads


def test_same_bits_alone_and_in_a_varlen_batch() -> None:
    lengths = ((100, 200), (0, 5), (70, 90))
    packed = Case("fp32", lengths=lengths, heads=4, kv_heads=2, causal=True)
    found, _ = run(packed)
    q, k, v, cu_q, cu_kv = packed.inputs()
    do, dlse = packed.output_gradients()
    for i in (0, 2):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_kv[i], cu_kv[i + 1])
        alone, (o, lse) = [np.empty_like(x[None]) for x in (q[rows], k[keys], v[keys])], (np.empty_like(do[None, rows]), None)
        lse = np.empty_like(dlse[None, :, rows])
        given = (q[None, rows], k[None, keys], v[None, keys], o, lse)
        options = {"mask": Causal(), "score": Scale(), "scale": packed.op.scale}
        cpu.run_forward(*given, **options, config=cpu.CpuConfig())
        cpu.run_backward(do[None, rows], *given, *alone, dlse=dlse[None, :, rows], **options, threads=1)
        for name, x, part in zip(("dq", "dk", "dv"), alone, (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(x[0], found[name][part])


def test_arrays_are_read_and_written_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences are many units: what follows from lengths is made once for all of one length and all calls, one call of the
    loops computes all units, and nothing of float32 is copied."""
    case, made, taken = Case("fp32", 3, 40, 50, 4, 2, causal=True), [], []
    find, load = cpu._key_units, cpu.load

    def kernel(*args: Any) -> cpu.Kernel:
        real = load(*args)

        def loops(*arrays: Any) -> None:
            taken.append(arrays)
            real.loops(*arrays)

        return real._replace(loops=loops)

    monkeypatch.setattr(cpu, "_key_units", lambda *args: made.append(args) or find(*args))
    cpu._dense_key_units.cache_clear()
    monkeypatch.setattr(cpu, "load", kernel)
    q, k, v = case.inputs()
    do, _ = case.output_gradients()
    o, lse = np.zeros_like(do), np.zeros((3, 4, 40), np.float32)
    found = [np.full_like(x, math.nan) for x in (q, k, v)]
    for _ in range(2):
        cpu.run_backward(do, q, k, v, o, lse, *found, Causal(), Scale(), 1.0, threads=1)
    assert len(made) == 1 and len(taken) == 2
    for args in taken:
        assert len(args[7]) == 3 * 2
        arrays = *args[:6], *args[-3:]
        assert all(x.ctypes.data == y.ctypes.data for x, y in zip(arrays, (do, q, k, v, o, lse, *found), strict=True))


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_memory_of_others_changes_nothing(dtype: str) -> None:
    """The loops do not clear their arrays, and what they get from the heap was another's."""
    case = Case(dtype, 2, 37, 110, 6, 2, head_dim=24, head_dim_v=17, causal=True, softcap=8.0, sinks=True)
    wanted = bits(run(case, threads=1)[0])
    for value in (math.nan, math.inf, 1e38):
        blocks = [np.full(1 << i, value, dtype.replace("fp", "float")) for i in range(6, 17) for _ in range(8)]
        del blocks
        assert bits(run(case, threads=1)[0]) == wanted, value


AVX2 = """\
import json, llvmlite.binding as binding
find = binding.get_host_cpu_features
binding.get_host_cpu_features = lambda: {name: is_there and not name.startswith("avx512") for name, is_there in find().items()}
import dataclasses
from rawattn.cpu import lanes
from tests.host.test_cpu_backward import LISTED, check
assert (lanes.BYTES, lanes.BLOCK) == (64, 6)
for dtype in ("fp32", "fp64"):
    for case in LISTED:
        check(dataclasses.replace(case, dtype=dtype))
print(json.dumps(len(LISTED)))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is of x86-64")
def test_registers_of_half_the_size(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Nothing is written beside a panel whose rows are no whole blocks of sums."""
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    assert process(AVX2, tmp_path) == len(LISTED)


def test_concurrent_calls() -> None:
    different = [Case(dtype, 1, 60 + 30 * i, 200, 4, 2, causal=True, sinks=True, seed=i) for i, dtype in enumerate(ELEMENTS)]
    wanted = [bits(run(case)[0]) for case in different]
    wrong: list[object] = []

    def repeat(case: Case, bits_wanted: list[bytes]) -> None:
        try:
            wrong.extend(case for _ in range(5) if bits(run(case)[0]) != bits_wanted)
        except Exception as error:
            wrong.append(error)

    at_once(repeat, zip(different, wanted, strict=True))
    assert not wrong


def test_rows_without_a_key_give_0_and_change_nothing() -> None:
    """The first 200 queries are before the first key; whatever do and dlse they have, only the sink hears of it."""
    case = Case("fp32", q_len=300, kv_len=100, causal=True)
    found, expected = run(case)
    assert (found["dq"][:, :200] == 0).all() and (found["dq"][:, 201:] != 0).any()
    assert all(np.isfinite(x).all() for x in found.values())
    expected().check(**found)


def test_logits_that_are_all_minus_infinity_give_0() -> None:
    case = Case("fp32", q_len=20, kv_len=30)
    (do, _), (_, k, v) = case.output_gradients(), case.inputs()
    q = np.full_like(do, 1e25)
    k[...] = -1e25  # finite, but the products overflow
    o, lse = np.empty_like(q), np.empty((1, 1, 20), np.float32)
    found = [np.full_like(x, math.nan) for x in (q, k, v)]
    cpu.run_forward(q, k, v, o, lse, Causal(), Scale(), 1.0, config=cpu.CpuConfig())
    assert (lse == -math.inf).all() and (o == 0).all()
    cpu.run_backward(do, q, k, v, o, lse, *found, Causal(), Scale(), 1.0)
    assert all((x == 0).all() for x in found)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, 80.0])
def test_extreme_sinks(sink: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "sink_logits", lambda self: np.array([0.5, sink], np.float32))
    case = Case("fp32", q_len=40, kv_len=50, heads=2, kv_heads=1, sinks=True, causal=True)
    found, expected = run(case)
    expected().check(**found)
    if sink == math.inf:
        _, dlse = case.output_gradients()
        np.testing.assert_allclose(found["dsinks"][1], dlse[:, 1].sum(), rtol=1e-5)
        assert (found["dq"][:, :, 1] == 0).all()
    if sink == -math.inf:
        assert found["dsinks"][1] == 0 and (found["dq"][:, :, 1] != 0).any()


def test_rows_of_no_sequence_get_0() -> None:
    case = Case("fp32", lengths=((20, 30), (10, 15)))
    q, k, v, cu_q, cu_kv = case.inputs()
    do, _ = case.output_gradients()
    cu_q, cu_kv = np.minimum(cu_q, 25), np.minimum(cu_kv, 32)
    o, lse = np.zeros_like(q), np.full((1, 30), 3.0, np.float32)
    found = [np.full_like(x, math.nan) for x in (q, k, v)]
    arguments = {"mask": Causal(), "score": Scale(), "scale": 0.1, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    cpu.run_backward(do, q, k, v, o, lse, *found, **arguments)
    assert (found[0][25:] == 0).all() and (found[1][32:] == 0).all() and (found[2][32:] == 0).all()
    assert all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("ends", [[1, 5, 10], [0, 6, 5], [0, 5, 11]])
def test_wrong_cu_seqlens(ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("fp32", lengths=((4, 4), (6, 6)))
    q, k, v, cu_q, _ = case.inputs()
    o, lse = np.zeros_like(q), np.zeros((1, 10), np.float32)
    with pytest.raises(ProblemError, match=r"cu_seqlens_kv is \[.*\]; it must start with 0"):
        cpu.run_backward(
            o, q, k, v, o, lse, q, k, v, Causal(), Scale(), 1.0, cu_seqlens_q=cu_q, cu_seqlens_kv=np.array(ends, np.int32)
        )


# ---- scores of one's own -------------------------------------------------------------------------------------------------


class Alibi(Scale):
    """s + slopes[head] (kv - q): Press et al., arXiv 2108.12409."""

    def __init__(self, slopes: Any) -> None:
        object.__setattr__(self, "slopes", slopes)

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s + self.slopes[head] * (kv - q)


class Bent(Alibi):
    """A function whose slope is not 1, and of all that a score is given."""

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 3 * xp.tanh(s / 2 + self.slopes[head] * batch) + 0.01 * (kv - q)

    def slope(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return 1.5 * (1 - xp.tanh(s / 2 + self.slopes[head] * batch) ** 2)


@settings(max_examples=40)
@given(cases(longest=60, head_dims=(1, 8, 17), sinks=None), st.sampled_from((Alibi, Bent)))
def test_scores_of_ones_own(case: Case, kind: type[Alibi]) -> None:
    check(dataclasses.replace(case, softcap=None), score=kind(2.0 ** -np.arange(1, case.heads + 1)))


def test_a_score_without_slope_is_named() -> None:
    class Forward(Option):
        def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
            return s

    score: Any = Forward()
    with pytest.raises(UnsupportedError, match=r"Forward.* has no slope\(...\)"):
        run(Case("fp32"), score)
