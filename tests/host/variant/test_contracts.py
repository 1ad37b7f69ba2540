"""The contracts of ``variant/interfaces.cuh``: an error names the axis and the member; and the arithmetic of the scores."""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib

import numpy as np
import pytest

from rawattn.compile import compiler
from rawattn.errors import CompileError
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.render import FOLDER
from rawattn.variant.element import BF16
from tests import emulator
from tests.operations import forward

# axis -> (file, what it loses, what the error says)
BROKEN = {
    "mask": ("variant/mask/full.cuh", "KeptKeys row(", "Mask: row(q, first)"),
    "tiles": ("variant/mask/full.cuh", "kv_tiles(", "Mask: kv_tiles("),
    "score": ("variant/score/scale.cuh", "derivative(", "Score: derivative("),
    "softmax": ("tile/softmax.cuh", "finish(", "Softmax: finish("),
    "weight": ("variant/weight/identity.cuh", "Number operator()(", "Weight: operator()("),
    "rows": ("variant/rows/dense.cuh", "head_of(", "Rows: q_of(row), head_of("),
    "store": ("variant/store/o.cuh", "void lse(", "Store: lse("),
    "kv": ("variant/kv/tma.cuh", "void load_v(", "Kv: load_k, load_v("),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_an_error_names_axis_and_member(broken: str) -> None:
    file, member, message = BROKEN[broken]
    source = ATTN_FWD.render(forward(BF16, 1, 64, 64, 1, 1, 64, 64), AttnFwdConfig(), "sm_90a")
    headers = dict(source.headers)
    assert headers[file].count(member) >= 1
    headers[file] = headers[file].replace(member, member.replace("(", "_(", 1) if "()" not in member else "Number call(")
    with pytest.raises(CompileError) as caught:
        compiler.compile(dataclasses.replace(source, headers=tuple(sorted(headers.items()))))
    first = str(caught.value)
    assert f'static assertion failed with "{message}' in first, first


SCORES = """
#include "threads.hpp"
using Number = float;
struct Args { float scale, softcap; };
struct Rows {};
#include "variant/score/softcap.cuh"

// logit[kind][i], and its derivative, of 32 n dot products: one by one in constant time, and as fragments.
extern "C" void logits(const Args* args, const float* s, float* logit, float* slope, int n) {
    emulate(1, 0, 1, 32, 0, false, [=] {
        const ConstantTimeSoftcap constant_time(*args, Rows(), WorkTile());
        const Softcap softcap(*args, Rows(), WorkTile());
        for (int i = 0; i < n; i += 8) {
            float fragment[8];
            for (int j = 0; j < 8; ++j) {
                const int at = (i + j) * 32 + threadIdx.x;
                fragment[j] = s[at];
                logit[at] = constant_time(s[at], 0, 0) * constant_time.scale_log2;
                slope[at] = softcap.derivative(s[at], 0, 0);
            }
            softcap.apply(fragment);
            for (int j = 0; j < 8; ++j) logit[(n + i + j) * 32 + threadIdx.x] = fragment[j] * softcap.scale_log2;
        }
    });
}
"""


def test_softcap_is_relative(tmp_path: pathlib.Path) -> None:
    """The error of a capped logit is relative to the logit, whatever the cap: a large cap leaves small logits as they are."""
    files = ("variant/score/softcap.cuh", "tile/log_sum.cuh", "variant/work_tile.cuh")
    scores = emulator.compiled(SCORES, {name: (FOLDER / name).read_text() for name in files}, tmp_path)
    rng, n = np.random.default_rng(0), 2048
    worst = np.zeros(3)
    for cap in (0.03, 1.0, 30.0, 50.0, 1e3, 1e6, 1e8, 1e20, 1e30):
        for magnitude in (1e-3, 0.3, 1.0, 10.0, 300.0):
            s = (rng.standard_normal(32 * n) * magnitude).astype(np.float32)
            s[::7] *= np.float32(min(cap, 1e6))  # some near the cap, beside small ones
            args, logit, slope = np.array([0.125, cap], np.float32), np.zeros((2, s.size), np.float32), np.zeros_like(s)
            pointers = (ctypes.c_void_p(x.ctypes.data) for x in (args, s, logit, slope))
            scores.logits(*pointers, n)
            t = np.tanh(0.125 * s.astype(np.float64) / args[1].astype(np.float64))
            exact = args[1].astype(np.float64) * t
            error = np.abs(logit * np.log(2.0) - exact) / np.abs(exact)
            worst = np.maximum(worst, [error[0].max(), error[1].max(), np.abs(slope - (1 - t * t)).max()])
    assert (worst < [1e-6, 1e-6, 1.5e-6]).all(), worst
