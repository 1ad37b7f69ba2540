"""Softmax without a reference under a cap: what it weighs, when its rows begin and end it, and that nothing spills."""

from __future__ import annotations

import ctypes
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.render import FOLDER
from rawattn.reference import attention
from rawattn.runtime.select import select
from rawattn.testing import expect
from rawattn.variant.element import BF16, FP16
from rawattn.variant.mask import And, Causal, Window
from rawattn.variant.score import ConstantTimeSoftcap, QuinticSoftcap, Softcap
from rawattn.variant.softmax import Unshifted
from tests import emulator
from tests.emulator.gpu import stand_in
from tests.operations import forward, replace

H200, CAPPED = TYPICAL["sm_90a"], forward(BF16, 4, 4096, 4096, 32, 32, 64, 64, score=Softcap(30.0))
CONFIG = AttnFwdConfig(64, 32, 2, 1)
# Factor and shift of logits, by kinds of rows. Of a sink all but one are below the reach; of what is lost no weight stays.
ROWS = {"ordinary": (1, 0), "some large": (3.5, 0), "near the cap": (40, 0), "a sink": (0.5, -9), "lost": (1, -300)}


@pytest.mark.parametrize("cap", [20.0, 30.0, 80.0])
@pytest.mark.parametrize("kind", ROWS)
def test_public_call(kind: str, cap: float, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are too small are in rows with heavy ones, or alone; those that are too large come after a warp has begun."""
    torch, (factor, shift) = pytest.importorskip("torch"), ROWS[kind]
    stand_in(monkeypatch, tmp_path, sm_count=1)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 2, 32), np.float32) for n in (70, 200, 200))
    q[..., :31] *= factor
    q[..., 31], k[..., 31] = 32**0.5, shift  # each logit's shift, but for one key's
    k[:, 190, :, 31] = 0
    q, k, v = (torch.from_numpy(x).bfloat16() for x in (q, k, v))
    for causal in (False, True):
        options: dict[str, Any] = {"causal": causal, "softcap": cap}
        found = rawattn.attention(q, k, v, **options, return_lse=True, kernel="attn_fwd", config=CONFIG)
        expect(q, k, v, **options).check(*found)


LARGE = {  # cap, shifts of the first keys and of the others, factor of the first's values, error by the largest one
    "of light keys": (30.0, -45, 0, 1e13, 2.0**-18),
    "of lighter keys in a light row": (30.0, -21, -15, 1e13, 2.0**-18),
    "of all keys": (80.0, 60, 60, 1e22, 0.0),
}


@pytest.mark.parametrize("kind", LARGE)
def test_large_values(kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys below the reach lose a part of the largest value at most, however light they are, and sums stay finite."""
    torch, (cap, shift, others, factor, error) = pytest.importorskip("torch"), LARGE[kind]
    stand_in(monkeypatch, tmp_path, sm_count=1)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 32), np.float32) for n in (64, 192, 192))
    some = slice(0, 32 if shift < others else 192)  # the tile that is visited last, or all
    q[..., 31], k[..., 31] = 32**0.5, others
    k[:, some, :, 31], v[:, some] = shift, abs(v[:, some]) * factor
    q, k, v = (torch.from_numpy(x).bfloat16() for x in (q, k, v))
    o = rawattn.attention(q, k, v, softcap=cap, kernel="attn_fwd", config=CONFIG).double().numpy()
    wanted = np.asarray(attention(q, k, v, softcap=cap))
    assert abs(o - wanted).max() <= error * float(v.abs().max()) + 2.0**-7 * abs(wanted).max()


EXPONENTS = """
#include "threads.hpp"
using Number = float;
struct Args { float scale, softcap, softcap_least; };
struct Rows { i32 kv_len; };
#include "variant/score/quintic_softcap.cuh"

extern "C" void exponents(const Args* args, const float* s, float* found, int n) {
    emulate(1, 0, 1, 32, 0, false, [=] {
        const QuinticSoftcap score(*args, Rows{1}, WorkTile());
        for (int i = threadIdx.x; i < n; i += 32) found[i] = score.exponent(s[i]);
        if (threadIdx.x == 0) found[n] = score.most;
    });
}
"""


@pytest.mark.parametrize("cap", [20.0, 30.0, 50.0, 80.0])
def test_exponents(cap: float, tmp_path: pathlib.Path) -> None:
    """Up to the reach they err by 1e-6 of the logit, beyond it they show; what small ones lose is within what is said."""
    score, n = QuinticSoftcap(cap), 1 << 16
    files = ("variant/score/quintic_softcap.cuh", "variant/score/softcap.cuh", "tile/log_sum.cuh", "variant/work_tile.cuh")
    library = emulator.compiled(EXPONENTS, {name: (FOLDER / name).read_text() for name in files}, tmp_path)
    x = np.concatenate([np.linspace(-4, 4, n // 2), np.linspace(-score.reach, score.reach, n // 2)])
    s, found = (x * cap / 0.125).astype(np.float32), np.zeros(n + 1, np.float32)
    args = np.array([0.125, cap, score.least(cap)], np.float32)
    library.exponents(*(ctypes.c_void_p(a.ctypes.data) for a in (args, s, found)), n)
    logit, exact = found[:n].astype(np.float64) * np.log(2), cap * np.tanh(s.astype(np.float64) * 0.125 / cap)
    near = abs(x) <= score.reach
    assert (abs(logit - exact)[near] <= 1e-6 * abs(exact[near])).all()
    assert (np.diff(logit[: n // 2]) > -1e-6 * cap).all()
    with np.errstate(over="ignore", invalid="ignore"):
        weight, lost = np.exp(exact), abs(np.exp(logit) - np.exp(exact))
        assert (np.exp(logit) > found[n] * (1 - 1e-3))[x > score.reach * 1.01].all()
    assert (lost <= score.least(cap) * 2.0**-18 + 1e-6 * abs(exact) * weight + 1e-37)[x < -score.reach].all()


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_nothing_spills(dims: tuple[int, int]) -> None:
    """In what is chosen, also where gradients follow."""
    packed = {"mask": And(Causal(), Window(100)), "varlen": True, "total_q": 8192, "total_kv": 8192}
    for changes in ({}, {"mask": Causal(), "return_lse": True, "sinks": True}, packed, {"dropout": 0.1}):
        op = replace(CAPPED, head_dim=dims[0], head_dim_v=dims[1], **changes)
        config = select(op, H200, "attn_fwd").config
        assert is_unshifted(op, config)
        binary = compiler.compile(ATTN_FWD.render(op, config, "sm_90a"))
        assert (binary.spill_bytes, binary.advisories) == (0, ()), (changes, config)


def is_unshifted(op: Any, config: AttnFwdConfig) -> bool:
    options = ATTN_FWD.options(op, config)
    found = type(options["Softmax"]) is Unshifted or type(getattr(options["Softmax"], "base", None)) is Unshifted
    assert found == (type(options["Score"]) is QuinticSoftcap) == ("softcap_least" in ATTN_FWD.values(op, config, H200))
    assert found == ("softcap_least" in {field.name for field in ATTN_FWD.fields(op, config)})
    return found


CHANGES: dict[str, tuple[dict[str, Any], bool]] = {
    "least": ({"score": Softcap(20.0)}, True),
    "most": ({"score": Softcap(80.0)}, True),
    "sinks": ({"sinks": True}, True),
    "packed": ({"varlen": True, "total_q": 8192, "total_kv": 8192}, True),
    "below": ({"score": Softcap(19.9)}, False),
    "above": ({"score": Softcap(80.1)}, False),
    "fp16": ({"element": FP16}, False),
    "constant time": ({"constant_time": True}, False),
    "invariant": ({"invariant": True}, False),
    "its own": ({"score": ConstantTimeSoftcap(30.0)}, False),
    "offsets": ({"q_offset": 9}, False),
    "shared tiles": ({"kv_heads": 8, "q_len": 64, "batch": 1}, False),
    "splits": ({"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 512, "kv_len": 65536}, False),
    "short": ({"batch": 256, "q_len": 64, "kv_len": 64}, False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_gets_it(name: str) -> None:
    changes, wanted = CHANGES[name]
    op = replace(CAPPED, **changes)
    assert is_unshifted(op, select(op, H200, "attn_fwd").config) == wanted


def test_caps_are_of_two_kinds() -> None:
    """A cap beyond those that are meant is not taken for one of them, and others share a kernel."""
    found = [replace(CAPPED, score=Softcap(cap)).kind for cap in (5.0, 100.0, 20.0, 50.0)]
    assert found[0] == found[1] != found[2] == found[3]


def test_bits_of_a_sequence_are_its_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a batch and among packed ones."""
    torch = pytest.importorskip("torch")
    stand_in(monkeypatch, tmp_path, sm_count=2)
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((3, n, 2, 32), np.float32)).bfloat16() for n in (70, 200, 200))
    q[0] *= 30  # whose rows take their reference back
    options: dict[str, Any] = {"softcap": 30.0, "return_lse": True, "kernel": "attn_fwd", "config": CONFIG}
    starts = [torch.tensor([n * i for i in range(4)], dtype=torch.int32) for n in (70, 200)]
    packed = rawattn.attention_varlen(*(x.flatten(0, 1) for x in (q, k, v)), *starts, **options)
    together = rawattn.attention(q, k, v, **options)
    for i in range(3):
        o, lse = rawattn.attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], **options)
        assert (o[0] == together[0][i]).all() and (lse[0] == together[1][i]).all()
        assert (o[0] == packed[0][70 * i : 70 * i + 70]).all()
