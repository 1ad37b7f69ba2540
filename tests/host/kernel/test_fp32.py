"""attn_fwd_mma in fp32: a number is the sum of two of tf32, and results are those of fp32."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.operation.operand import Layout
from rawattn.runtime.select import select
from rawattn.testing import expect
from rawattn.variant.element import E4M3, FP32
from rawattn.variant.mask import And, Causal, Window
from rawattn.variant.score import Softcap
from tests.decode import Decode
from tests.emulator.gpu import stand_in
from tests.operations import forward, replace
from tests.options import Dilated

H200, SQUARE = TYPICAL["sm_90a"], forward(FP32, 2, 4096, 4096, 16, 16, 128, 128, return_lse=True)
PAIRS, NARROW, WIDE = (128, 32, 2), (64, 64, 1), (64, 32, 1)  # rows and keys of a tile, tiles of a warp

SIZES = {"q_len": 70, "kv_len": 150, "heads": 1, "kv_heads": 1}
CALLS: dict[str, tuple[int, tuple[int, int, int], dict[str, int], dict[str, Any]]] = {  # head_dim, form, sizes, options
    "causal": (128, WIDE, {}, {"causal": True}),
    "negative scale": (64, PAIRS, {}, {"scale": -0.3}),
    "padded columns": (40, NARROW, {}, {"window": (100, 3)}),
    "few rows in splits": (64, NARROW, {"q_len": 3, "kv_len": 700, "heads": 8, "kv_heads": 2}, {"causal": True}),
    "one row of wide heads": (96, WIDE, {"q_len": 1, "kv_len": 530}, {}),
    "large logits": (64, PAIRS, {}, {"scale": 4.0, "causal": True}),
    "a function": (24, NARROW, {}, {"score": lambda s, q, kv: s - 0.1 * abs(q - kv), "mask": lambda q, kv: (q + kv) % 7 != 0}),
    "used rows": (32, PAIRS, {}, {"kv_lens": (101,), "q_lens": (70,), "causal": True}),
    "invariant": (8, PAIRS, {}, {"invariant": True, "causal": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_call(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is chosen, within the bounds of float32. From 32 columns on errors are smaller than those of attn_fwd_simt."""
    torch, (size, form, sizes, options) = pytest.importorskip("torch"), CALLS[name]
    stand_in(monkeypatch, tmp_path, sm_count=4)
    lengths, rng = SIZES | sizes, np.random.default_rng(0)
    shapes = [(1, lengths["q_len"], lengths["heads"], size), *[(1, lengths["kv_len"], lengths["kv_heads"], size)] * 2]
    q, k, v = (torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in shapes)
    given = {key: torch.tensor(x, dtype=torch.int32) if key in ("kv_lens", "q_lens") else x for key, x in options.items()}
    plan = rawattn.plan(q, k, v, **given, return_lse=True)
    chosen = plan.config.tile_q, plan.config.tile_kv, plan.config.m_tiles_per_warp
    assert (plan.kernel, chosen) == ("attn_fwd_mma", form)
    wanted = expect(q, k, v, **{key: x for key, x in given.items() if key != "invariant"})
    o, lse = rawattn.attention(q, k, v, **given, return_lse=True)
    wanted.check(o, lse)
    simt = rawattn.attention(q, k, v, **given, kernel="attn_fwd_simt")
    error, error_of_simt = (float(np.abs(x.double().numpy() - wanted.o).max()) for x in (o, simt))
    assert error < error_of_simt * (1 if size >= 32 and name != "one row of wide heads" else 2)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80", "sm_100"])
@pytest.mark.parametrize("size", [40, 64, 72, 96, 128])
def test_nothing_spills(arch: str, size: int) -> None:
    packed = {"mask": And(Causal(), Window(100)), "varlen": True, "total_q": 8192, "total_kv": 8192}
    for changes in ({}, {"mask": Causal(), "sinks": True}, packed, {"mask": Dilated(3)}):
        op = replace(SQUARE, head_dim=size, head_dim_v=size, **changes)
        selection = select(op, TYPICAL[arch])
        assert selection.kernel is ATTN_FWD_MMA and selection.slow is None
        (launch,) = ATTN_FWD_MMA.lower(op, selection.config, TYPICAL[arch]).launches
        assert compiler.compile(launch.source).spill_bytes == 0, changes


def test_when_it_runs() -> None:
    """It runs where tensor cores are faster than FFMA. Where only attn_fwd_simt computes a call, a warning says so."""
    for arch, device in TYPICAL.items():
        found = select(SQUARE, device)
        has_fast_products = arch in ("sm_80", "sm_90a", "sm_100", "sm_103", "sm_110")
        assert found.kernel.name == ("attn_fwd_mma" if has_fast_products else "attn_fwd_simt") and found.slow is None
    odd = Layout(unaligned="a stride of 4")
    for changes in ({"dropout": 0.1}, {"score": Softcap(30.0)}, {"constant_time": True}, {"head_dim": 136}, {"layout": odd}):
        found = select(replace(SQUARE, **changes), H200)
        assert found.kernel.name == "attn_fwd_simt" and found.slow and "attn_fwd_mma, which is made for" in found.slow
        with pytest.raises(
            rawattn.UnsupportedError, match=r"fp32 without dropout, softcap and constant_time|from 8 to 128|a stride of 4"
        ):
            select(replace(SQUARE, **changes), H200, "attn_fwd_mma")
    assert select(SQUARE, TYPICAL["sm_89"], "attn_fwd_mma").kernel is ATTN_FWD_MMA
    cached = Decode(page=64, q_len=512).operation
    for kv_element in (FP32, E4M3):
        with pytest.raises(rawattn.UnsupportedError, match="attn_fwd_mma: it takes bf16 and fp16, not fp32"):
            select(dataclasses.replace(cached, element=FP32, kv_element=kv_element), H200)
