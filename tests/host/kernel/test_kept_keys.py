"""Keys that stay in the rings of attn_fwd while a block computes query tiles of a head one by one; what TMA asks L2 for."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, ClassVar

import numpy as np
import pytest

import rawattn
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.attn_fwd_kvcache import ATTN_FWD_KVCACHE
from rawattn.runtime.select import forget, select
from rawattn.testing import expect
from rawattn.variant import kv, walk
from rawattn.variant.element import BF16
from rawattn.variant.field import Field, Fields, PackedHeads, PageRows, Pointer, TensorMap
from rawattn.variant.mask import Causal
from tests import emulator
from tests.decode import Decode
from tests.emulator.gpu import stand_in
from tests.operations import forward, replace
from tests.options import Alibi, Dilated

H200 = TYPICAL["sm_90a"]
SHORT = forward(BF16, 128, 256, 256, 16, 16, 128, 128)
KEPT = AttnFwdConfig(64, 32, 2, 1, run=3)

CALLS: dict[str, tuple[dict[str, int], dict[str, Any], AttnFwdConfig]] = {  # sizes, options, configuration
    "full": ({}, {}, KEPT),
    "causal": ({}, {"causal": True}, KEPT),
    "two warpgroups in turn": ({"q_len": 300}, {"causal": True}, AttnFwdConfig(128, 32, 2, 2, run=2)),
    "three": ({"q_len": 250}, {"causal": True}, AttnFwdConfig(192, 32, 3, 1, run=2)),
    "runs over heads": ({"heads": 6}, {"causal": True, "sinks": True}, dataclasses.replace(KEPT, run=7)),
    "fewer tiles than stages": ({"kv_len": 20}, {}, dataclasses.replace(KEPT, stages=4)),
    "window": ({"kv_len": 190}, {"window": (40, 9)}, dataclasses.replace(KEPT, stages=6)),
    "rows without keys": ({"kv_len": 33}, {"causal": True}, KEPT),
    "masks of heads, dropout": ({}, {"score": Alibi(0.9), "dropout": 0.3, "seed": 5}, KEPT),
    "softcap, offsets": ({}, {"softcap": 2.0, "causal": True, "q_offset": 9, "kv_offset": 4}, KEPT),
    "constant time": ({}, {"constant_time": True, "causal": True}, KEPT),
    "no keys": ({"kv_len": 0}, {}, KEPT),
    "more keys than rings hold": ({"kv_len": 150}, {"causal": True}, KEPT),
    "blocks that share": ({}, {}, AttnFwdConfig(64, 32, 2, 1, ctas_per_sm=2, run=2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_public_call(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By fewer multiprocessors than works. More keys are refused, but for a program that was made for fewer."""
    torch = pytest.importorskip("torch")
    stand_in(monkeypatch, tmp_path, sm_count=3)
    if name == "more keys than rings hold":
        monkeypatch.setattr(attn_fwd, "run_reasons", lambda *_: [])
    sizes, options, config = CALLS[name]
    size = {"batch": 2, "q_len": 170, "kv_len": 61, "heads": 4, "kv_heads": 2, **sizes}
    rng = np.random.default_rng(0)
    shapes = [
        (size["batch"], size[f"{side}_len"], size[heads], 32) for side, heads in (("q", "heads"), *[("kv", "kv_heads")] * 2)
    ]
    q, k, v = (torch.from_numpy(rng.standard_normal(shape, np.float32)).bfloat16() for shape in shapes)
    given = dict(options)
    if given.pop("sinks", False):
        given["sinks"] = torch.linspace(-2, 3, size["heads"])
    wanted = expect(q, k, v, **{name: x for name, x in given.items() if name != "constant_time"})
    wanted.check(*rawattn.attention(q, k, v, **given, return_lse=True, kernel="attn_fwd", config=config))


class CountedKv(kv.TmaKv):
    """Counts the tiles that are loaded."""

    source: ClassVar[str] = "../tests/host/counted_kv.cuh"

    @property
    def fields(self) -> Fields:
        return (*super().fields, Field("tiles_loaded", "i32*", Pointer("tiles_loaded")))


@pytest.mark.parametrize("run, loaded", [(1, 24), (2, 8)])
def test_tiles_are_loaded_once(run: int, loaded: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of three query tiles each, over two tiles of keys and two of values, by one block."""
    op, config = forward(BF16, 1, 180, 64, 2, 2, 32, 32), dataclasses.replace(KEPT, run=run)
    options = ATTN_FWD.options
    monkeypatch.setattr(ATTN_FWD, "options", lambda op, config: options(op, config) | {"Kv": CountedKv()})
    q, k, v = (np.random.default_rng(0).standard_normal((1, n, 2, 32)).astype(BF16.dtype) for n in (180, 64, 64))
    o, count = np.zeros(q.shape, BF16.dtype), np.zeros(1, np.int32)
    launch = ATTN_FWD.launch(op, config, H200)
    values: dict[str, Any] = {**launch.values, "o": o, "counter": np.zeros(2, np.int32), "tiles_loaded": count}
    values |= {"o_stride_batch": 0, "o_stride_row": 64, "o_stride_head": 32, "kv_len": 64}
    values |= {name: emulator.tma(x, box) for name, x, box in (("q", q, 64), ("k", k, 32), ("v", v, 32))}
    emulator.Kernel(launch.source, launch.fields, tmp_path, BF16.lse_name)(1, values)
    assert count[0] == loaded and np.isfinite(o.astype(np.float32)).all() and o.any()


def test_order() -> None:
    """All query tiles of a head follow each other; the code of other configurations is as it was."""
    launch = ATTN_FWD.launch(SHORT, AttnFwdConfig(128, 128, 2, 2, run=2), H200)
    assert (launch.values["run"], launch.values["l2_head_group"], launch.values["last_group"]) == (2, 1, 128 * 16 - 1)
    config = dict(launch.source.headers)["config.cuh"]
    assert launch.grid == 132 and "KeptWalk" in config and "LptScheduler<Runs<DynamicPersistent>>" in config
    assert type(ATTN_FWD.options(SHORT, AttnFwdConfig())["Walk"]) is walk.IntervalWalk


def test_who_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody, until it was timed. Under a mask four tiles of 64 rows have two of 128; others than those keep what they had."""

    def chosen(op: Any) -> tuple[int, int, int]:
        config = select(op, H200).config
        return config.tile_q, config.tile_kv, config.run

    causal = replace(SHORT, mask=Causal())
    assert chosen(SHORT) == (128, 128, 1) and chosen(causal) == (128, 64, 1)
    assert chosen(replace(causal, q_len=384, kv_len=384)) == chosen(replace(causal, q_len=192, kv_len=192)) == (192, 64, 1)
    assert chosen(replace(causal, head_dim=64, head_dim_v=64)) == (256, 64, 1)
    for options in ({"mask": Dilated(3)}, {"mask": Causal(), "score": Alibi(0.5)}):
        assert not attn_fwd.is_short(replace(SHORT, **options)), "not measured"
    monkeypatch.setattr(attn_fwd, "_KEEPS_KEYS", True)
    forget()
    assert chosen(SHORT) == chosen(causal) == (128, 128, 2)
    assert chosen(replace(causal, kv_lens=True))[2] == chosen(replace(causal, q_len=384, kv_len=384))[2] == 1
    monkeypatch.undo()
    forget()


MANY = forward(BF16, (1 << 27) - 6144, 64, 64, 16, 16, 8, 8)
REFUSED: dict[str, tuple[AttnFwdConfig, Any]] = {
    "run is 0; it must be from 1 to 1024": (AttnFwdConfig(run=0), SHORT),
    "run is 1025; it must be from 1 to 1024": (AttnFwdConfig(run=1025), SHORT),
    "run is 1024; it counts up to 2147483647 works": (AttnFwdConfig(run=1024), MANY),
    "run is 2; it must be 1 for more keys than rings hold, 256": (AttnFwdConfig(run=2), replace(SHORT, kv_len=257)),
    "run is 2; .* several lengths": (AttnFwdConfig(run=2), replace(SHORT, kv_lens=True)),
    "run is 2; .* masks with holes": (AttnFwdConfig(run=2), replace(SHORT, mask=Dilated(3))),
    "run is 2; .* splits": (AttnFwdConfig(run=2, kv_splits=2), replace(SHORT, mask=Causal())),
    "run is 2; it must be 1 over caches": (AttnFwdConfig(run=2), Decode(page=16, q_len=64).operation),
    "l2_bytes is 128; it must be 256 over small pages": (AttnFwdConfig(l2_bytes=128), Decode(page=16, q_len=64).operation),
    "l2_bytes is 32; it must be 64, 128 or 256": (AttnFwdConfig(l2_bytes=32), SHORT),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refusals(said: str) -> None:
    config, op = REFUSED[said]
    with pytest.raises(rawattn.ProblemError, match=said):
        select(op, H200, "attn_fwd", config)


@pytest.mark.parametrize("l2_bytes", [64, 128, 256])
def test_what_tma_asks_l2_for(l2_bytes: int) -> None:
    """It is in all maps of q, k and v, and in no code."""
    few = forward(BF16, 1, 32, 4096, 32, 8, 128, 128, mask=Causal())
    cached = Decode(page=64, q_len=100).operation
    for kernel, op, config in (
        (ATTN_FWD, SHORT, AttnFwdConfig()),
        (ATTN_FWD, few, AttnFwdConfig(pack_gqa=True, kv_splits=2)),
        (ATTN_FWD, replace(SHORT, kv_lens=True), AttnFwdConfig()),
        (ATTN_FWD_KVCACHE, cached, AttnFwdConfig()),
    ):
        changed = dataclasses.replace(config, l2_bytes=l2_bytes)
        fills = [field.fill for field in kernel.fields(op, changed)]
        found = {fill.l2_bytes for fill in fills if isinstance(fill, (TensorMap, PageRows, PackedHeads))}
        assert found == {l2_bytes}
        assert kernel.render(op, changed, "sm_90a") == kernel.render(op, config, "sm_90a")
