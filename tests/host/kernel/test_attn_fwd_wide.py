"""attn_fwd_wide.cu, whose blocks form clusters, thread by thread on the CPU: threads and copies come in any order. What is
computed is compared with the formula, so that a stage that is read too early or too late shows."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest

from perf.lib.compiling import faults
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd_wide
from rawattn.kernel.attn_fwd_wide import ATTN_FWD_WIDE, AttnFwdWideConfig
from rawattn.variant.element import BF16
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests import host_threads
from tests.host.kernel import test_forward
from tests.host.kernel.test_forward import Case
from tests.host.kernel.test_render import words
from tests.operations import forward, replace

H200 = TYPICAL["sm_90a"]


def run(case: Case, folder: pathlib.Path, config: AttnFwdWideConfig, seed: int = 0) -> tuple[Any, Any]:
    op = dataclasses.replace(case.op, sinks=case.sinks is not None)
    assert ATTN_FWD_WIDE.legal(config, op, H200) is None
    (launch,) = ATTN_FWD_WIDE.lower(op, config, H200).launches
    memory = dict(zip("qkv", test_forward.arrays(case), strict=True))
    memory["o"] = np.full((2, case.q_len, case.heads, case.head_dim_v), np.nan, case.element.dtype)
    memory["lse"] = np.full((2, case.heads, case.q_len), np.nan, np.float32)
    memory |= {"sinks": np.array(case.sinks or (), np.float32), "seed": np.array([test_forward.SEED])}
    args = host_threads.arguments(launch, memory)
    host_threads.run(launch, folder, args, config.cluster, config.cluster, seed)
    return memory["o"].astype(np.float64), memory["lse"]


SMALL = {"head_dim": 272, "head_dim_v": 16}
TWO, ONE, FOUR = (AttnFwdWideConfig(64 * n) for n in (2, 1, 4))
CASES = {
    "512": (Case("attn_fwd_wide", 100, 130, 2, head_dim=512, head_dim_v=512), TWO),
    "halves of other widths": (Case("attn_fwd_wide", 128, 200, 1, mask=Full(), head_dim=320, head_dim_v=304), TWO),
    "a warpgroup without columns": (Case("attn_fwd_wide", 64, 65, 2, 2, scale=-0.3, **SMALL), ONE),
    "four blocks": (Case("attn_fwd_wide", 300, 400, 1, sinks=(0.5,), mask=And(Causal(), Window(100)), **SMALL), FOUR),
    "deep ring": (Case("attn_fwd_wide", 128, 500, 1, score=Softcap(2.0), **SMALL), AttnFwdWideConfig(128, stages=5)),
    "one tile": (Case("attn_fwd_wide", 3, 60, 2, dropout=0.3, **SMALL), TWO),
    "rows without keys": (Case("attn_fwd_wide", 200, 70, 1, sinks=(-1.0,), **SMALL), TWO),
    "clusters without keys": (Case("attn_fwd_wide", 200, 40, 1, **SMALL), TWO),
    "constant time": (Case("attn_fwd_wide", 70, 200, 1, constant_time=True, head_dim=40, head_dim_v=264), TWO),
}


@pytest.mark.parametrize("seed", [0, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_against_the_formula(name: str, seed: int, tmp_path: pathlib.Path) -> None:
    case, config = CASES[name]
    o, lse = run(case, tmp_path, config, seed)
    wanted_o, wanted_lse = test_forward.expected(case)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(o, wanted_o, rtol=1.2e-2, atol=1.2e-2)


def test_any_order_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    """Of threads and of copies, and any number of blocks that read keys together."""
    case = Case("attn_fwd_wide", 128, 520, 1, mask=Full(), **SMALL)
    wanted = run(case, tmp_path, ONE)
    for seed, config in ((1, TWO), (2, TWO), (3, FOUR), (4, AttnFwdWideConfig(256, stages=4))):
        found = run(case, tmp_path, config, seed)
        assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True)), (seed, config)


KINDS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"mask": Causal()},
    "window": {"mask": And(Causal(), Window(100)), "score": Softcap(30.0), "scale": -0.1},
    "dropout": {"mask": Causal(), "dropout": 0.1}, "constant time": {"mask": Causal(), "constant_time": True},
    "packed": {"mask": Causal(), "sinks": True, "varlen": True, "total_q": 8192, "total_kv": 8192},
}  # fmt: skip
COMPILED = [((512, 512), kind, 2) for kind in KINDS] + [((512, 512), "causal", n) for n in (1, 4)]
COMPILED += [(size, "window", 2) for size in ((320, 320), (448, 384), (512, 64), (64, 512))]


@pytest.mark.parametrize("size, kind, cluster", COMPILED)
def test_nothing_spills_and_products_follow_each_other(size: tuple[int, int], kind: str, cluster: int) -> None:
    op = replace(forward(BF16, 2, 4096, 4096, 16, 16, *size, scale=0.1, return_lse=True), **KINDS[kind])
    for config in {AttnFwdWideConfig(64 * cluster), *ATTN_FWD_WIDE.candidates(op, H200)}:
        assert ATTN_FWD_WIDE.legal(config, op, H200) is None
        binary = compiler.compile(ATTN_FWD_WIDE.render(op, config, "sm_90a"))
        assert not faults(binary), (config, faults(binary))
        smem_bytes, _, threads, *_ = words(binary.cubin, "facts")
        assert threads == 384 and smem_bytes <= attn_fwd_wide.smem_bytes(config, op) <= H200.smem_bytes


def test_reasons() -> None:
    wide = forward(BF16, 2, 512, 512, 8, 8, 512, 512)
    assert ATTN_FWD_WIDE.supports(wide, H200) == []
    for changes, said in (
        ({"head_dim": 256, "head_dim_v": 256}, "one is above 256"), ({"head_dim": 576}, "from 8 to 512"),
        ({"kv_lens": True}, "kv_lens of packed sequences"),
    ):  # fmt: skip
        assert said in "; ".join(ATTN_FWD_WIDE.supports(replace(wide, **changes), H200))
    for config, said in (
        (AttnFwdWideConfig(192), "tile_q is 192"), (AttnFwdWideConfig(stages=2), "stages is 2"),
        (AttnFwdWideConfig(stages=4), "shared memory"),
        (AttnFwdWideConfig(weigh_registers=192), "weigh_registers is 192"),
    ):  # fmt: skip
        assert said in str(ATTN_FWD_WIDE.legal(config, wide, H200))
