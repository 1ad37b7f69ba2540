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
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA, AttnFwdMmaConfig
from rawattn.runtime.select import select
from rawattn.testing import expect
from rawattn.variant.element import E4M3, FP32
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests.decode import Decode
from tests.emulator.gpu import stand_in
from tests.operations import forward, replace

SMALL, PAIRS = AttnFwdMmaConfig(64, 64, 2, 1, 0, 2), AttnFwdMmaConfig(128, 32, 2, 2, 0, 1)
SQUARE = forward(FP32, 2, 4096, 4096, 16, 16, 128, 128, return_lse=True)


@pytest.mark.parametrize(
    "size, config, options",
    [(128, SMALL, {"causal": True}), (64, PAIRS, {"scale": -0.3}), (40, SMALL, {"softcap": 5.0, "window": (100, 3)})],
    ids=str,
)
def test_public_call(
    size: int, config: AttnFwdMmaConfig, options: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    stand_in(monkeypatch, tmp_path, sm_count=2)
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, n, h, size), np.float32)) for n, h in ((70, 2), (150, 1), (150, 1)))
    found = rawattn.attention(q, k, v, **options, return_lse=True, kernel="attn_fwd_mma", config=config)
    expect(q, k, v, **options).check(*found)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("size", [64, 128])
def test_nothing_spills(arch: str, size: int) -> None:
    packed = {"mask": And(Causal(), Window(100)), "varlen": True, "total_q": 8192, "total_kv": 8192}
    for changes in ({}, packed, {"score": Softcap(30.0)}):
        op = replace(SQUARE, head_dim=size, head_dim_v=size, **{"mask": Full(), **changes})
        (launch,) = ATTN_FWD_MMA.lower(op, select(op, TYPICAL[arch], "attn_fwd_mma").config, TYPICAL[arch]).launches
        assert compiler.compile(launch.source).spill_bytes <= 8 * (arch == "sm_80")


def test_when_it_runs() -> None:
    """Where it is asked for, until it has been timed."""
    assert select(SQUARE, TYPICAL["sm_90a"]).kernel.name == "attn_fwd_simt"
    for changes in ({"dropout": 0.1}, {"constant_time": True}):
        with pytest.raises(rawattn.UnsupportedError, match="it takes fp32 without dropout and constant_time"):
            select(replace(SQUARE, **changes), TYPICAL["sm_90a"], "attn_fwd_mma")
    cached = Decode(page=64, q_len=512).operation
    for kv_element in (FP32, E4M3):
        with pytest.raises(rawattn.UnsupportedError, match="attn_fwd_mma: it takes bf16 and fp16, not fp32"):
            select(dataclasses.replace(cached, element=FP32, kv_element=kv_element), TYPICAL["sm_90a"])
    with pytest.raises(rawattn.UnsupportedError, match="multiples of 8 from 8 to 128"):
        select(replace(SQUARE, head_dim=136), TYPICAL["sm_90a"], "attn_fwd_mma")
