"""Blocks of attn_fwd that share a multiprocessor: on the CPU, thread by thread; how many there are, and that nothing spills."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig, is_short, smem_bytes
from rawattn.runtime.select import select
from rawattn.testing import expect
from rawattn.variant.element import BF16
from rawattn.variant.mask import And, Causal, Full, Window
from rawattn.variant.score import Softcap
from tests.decode import Decode
from tests.emulator.gpu import stand_in
from tests.operations import forward, replace
from tests.options import Alibi, Dilated

PACKED = {"varlen": True, "total_q": 32768, "total_kv": 32768, "mask": And(Causal(), Window(100)), "score": Softcap(30.0)}
H200, SHORT = TYPICAL["sm_90a"], forward(BF16, 256, 128, 128, 12, 12, 64, 64)
THREE, TWO = AttnFwdConfig(64, 64, 3, 2, ctas_per_sm=3), AttnFwdConfig(64, 128, 3, 2, ctas_per_sm=2)
WIDE = AttnFwdConfig(128, 48, 4, 2, ctas_per_sm=2)
FOUR = forward(BF16, 128, 256, 256, 16, 16, 128, 128, mask=Causal())


@pytest.mark.parametrize("form", [(THREE, True, False), (TWO, True, True), (WIDE, True, False), (WIDE, False, True)], ids=str)
def test_public_call(form: tuple[AttnFwdConfig, bool, bool], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one multiprocessor, so that each of its blocks draws several works."""
    torch, (config, causal, packed) = pytest.importorskip("torch"), form
    stand_in(monkeypatch, tmp_path, sm_count=1)
    rng, starts = np.random.default_rng(0), [torch.tensor(x, dtype=torch.int32) for x in ((0, 75, 75, 150), (0, 90, 97, 180))]
    q, k, v = (torch.from_numpy(rng.standard_normal((2, n, 3, 32), np.float32)).bfloat16() for n in (75, 90, 90))
    if packed:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    given, call = ((q, k, v, *starts), rawattn.attention_varlen) if packed else ((q, k, v), rawattn.attention)
    found = call(*given, causal=causal, return_lse=True, kernel="attn_fwd", config=config)
    expect(*given, causal=causal).check(*found)


@pytest.mark.parametrize("config, size", [(THREE, 64), (TWO, 64), (WIDE, 64), (AttnFwdConfig(64, 96, 2, 1, ctas_per_sm=2), 128)])
def test_blocks(config: AttnFwdConfig, size: int) -> None:
    """A block for each work, up to as many as multiprocessors hold, by registers and by shared memory."""
    op, most = replace(SHORT, head_dim=size, head_dim_v=size), 132 * config.ctas_per_sm
    for changes, grid in (({}, most), (PACKED, most), ({"batch": 1}, 12 * 128 // config.tile_q)):
        (launch,) = ATTN_FWD.lower(replace(op, **changes), config, H200).launches
        binary = compiler.compile(launch.source)
        assert (launch.grid, binary.spill_bytes, binary.advisories) == (grid, 0, ())
        assert binary.registers == 65536 // (128 * (1 + config.consumers) * config.ctas_per_sm) // 8 * 8
    assert config.ctas_per_sm * (smem_bytes(config, op) + 1024) <= 228 << 10


def test_four_tiles_are_short_under_a_mask() -> None:
    """Of wide heads, where they have two of 128 rows; others than those keep what they had."""

    def chosen(**changes: Any) -> tuple[int, int]:
        config = select(replace(FOUR, **changes), H200).config
        return config.tile_q, config.tile_kv

    assert chosen() == (128, 64) and chosen(mask=Full()) == (128, 128)
    assert chosen(q_len=384, kv_len=384) == chosen(q_len=192, kv_len=192) == (192, 64)
    assert chosen(head_dim=64, head_dim_v=64) == (256, 64)
    for options in ({"mask": Dilated(3)}, {"score": Alibi(0.5)}):
        assert not is_short(replace(FOUR, **options)), "not measured"


REFUSED: dict[str, tuple[AttnFwdConfig, Any]] = {
    "0; it must be 1, or 2 or 3 where tile_q is 64": (AttnFwdConfig(64, 64, ctas_per_sm=0), SHORT),
    "3; it must be 1, or 2 or 3 where": (AttnFwdConfig(128, 32, ctas_per_sm=3), SHORT),
    "3; tile_kv and head_dim_v must be up to 100": (AttnFwdConfig(64, 32, ctas_per_sm=3), replace(SHORT, head_dim_v=128)),
    "take 80 registers of a thread; above 72": (AttnFwdConfig(128, 64, ctas_per_sm=2), SHORT),
    "3 blocks need .* bytes of shared memory": (AttnFwdConfig(64, 64, 4, 2, ctas_per_sm=3), SHORT),
    "2; it must be 1 for functions and masks with holes": (TWO, replace(SHORT, mask=Dilated(3))),
    "2; it must be 1 over caches": (TWO, Decode(page=16, q_len=64).operation),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals(said: str) -> None:
    config, op = REFUSED[said]
    with pytest.raises(rawattn.ProblemError, match=said):
        select(op, H200, "attn_fwd", config)
