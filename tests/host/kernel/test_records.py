"""attn_fwd_mma over records of 656 bytes, run thread by thread on the CPU, beside attention over what they say."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

import rawattn
from rawattn import FP8_DS_MLA, Spec
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_fwd_mma import AttnFwdMmaConfig
from rawattn.operation import AttentionKVCache
from rawattn.operation.keys import KeyLists, ListSizes
from rawattn.runtime.select import select
from rawattn.testing import _move
from rawattn.variant.element import BF16, FP16
from rawattn.variant.mask import And, Causal, Window
from rawattn.variant.score import Softcap
from tests.caches import Recorded
from tests.emulator.gpu import stand_in
from tests.host.kernel import test_compile_matrix as matrix
from tests.host.kernel.test_attn_fwd_kvcache import attend, check
from tests.host.kernel.test_compile_portable import instructions
from tests.key_lists import ListedStep, Lists, to_numpy

torch = pytest.importorskip("torch")
SMALL = AttnFwdMmaConfig(16, 16, 2, 1, 1, 1)
LARGE = AttnFwdMmaConfig(48, 32, 2, 1, 0, 1)  # 24 rows of threads, in two turns, the second one of eight
ONE = Recorded(((1, 40), (1, 0), (1, 17), (1, 70)), False, page_size=64)
CHUNKS = Recorded(((20, 50), (0, 5), (1, 0), (1, 33), (3, 3)), page_size=8, heads=3)


def of(case: Any, **changes: Any) -> Any:
    return dataclasses.replace(case, **changes)


CASES = {
    "one": (ONE, SMALL),
    "larger tiles": (of(ONE, heads=50, page_size=1), LARGE),
    "fp16": (of(ONE, dtype="fp16", sinks=True, softcap=5.0), SMALL),
    "dense": (of(ONE, form="dense", page_size=71), SMALL),
    "chunks": (CHUNKS, of(LARGE, pack_gqa=True)),
    "chunks of heads": (of(CHUNKS, form="indptr", heads=2, window=(9, 0), whole=True), SMALL),
    "full": (of(CHUNKS, causal=False, page_size=1), of(SMALL, pack_gqa=True)),
    "begins": (of(CHUNKS, begins=(13, 5, 9, 20, 0), causal=(0, 1, 1, 0, 1)), of(SMALL, pack_gqa=True)),
}
STEPS = {
    "table": ListedStep(of(CHUNKS, lengths=((3, 90), (0, 5), (1, 0), (1, 33))), Lists(40, counts=True, empty=True)),
    "rows": ListedStep(of(CHUNKS, page_size=61, lengths=((2, 90), (1, 7))), Lists(40), physical=True),
    "rows, same": ListedStep(of(ONE, lengths=((2, 60), (2, 90)), heads=50, page_size=3), Lists(35), physical=True),
    "blocks": ListedStep(of(ONE, lengths=((2, 90), (2, 33))), Lists(2, heads=1, block_q=2, block_kv=16)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not count are NaN, in each of their parts."""
    word, (case, config) = stand_in(monkeypatch, tmp_path), CASES[name]
    packs = config.pack_gqa or not case.ragged
    check(case, *attend(case, kernel="attn_fwd_mma", config=of(config, pack_gqa=packs))[:2])
    assert word[0] == 0


@pytest.mark.parametrize("changes", [{}, {"ragged": False, "lengths": ((1, 1100), (1, 30))}], ids=["chunks", "steps"])
def test_what_is_chosen(changes: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged steps are not split, others are."""
    word, case = stand_in(monkeypatch, tmp_path), of(CHUNKS, heads=16, **changes)
    check(case, *attend(case, kernel="attn_fwd_mma", config=None)[:2])
    assert word[0] == 0


def test_q_as_a_pair(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a kernel of its own, and the bits of one array, which was asked for before."""
    stand_in(monkeypatch, tmp_path)
    q, cache, step = _move(ONE.rows(16, 576, 1), "torch", "cpu"), ONE.cache("torch"), ONE.step("torch")
    options: dict[str, Any] = {"kernel": "attn_fwd_mma", "config": of(SMALL, pack_gqa=True), "return_lse": True}
    wanted = rawattn.attention_kvcache(q, cache, step, **options)
    found = rawattn.attention_kvcache((q[..., :512].contiguous(), q[..., 512:].contiguous()), cache, step, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def listed(step: ListedStep, is_pair: bool = False, **options: Any) -> Any:
    q = _move(step.case.rows(step.case.heads, step.case.head_dim, 1), "torch", "cpu")
    given = (q[..., :512].contiguous(), q[..., 512:].contiguous()) if is_pair else q
    made = step.step(lambda x: _move(x, "torch", "cpu"), "torch")
    return rawattn.attention_kvcache(given, step.cache("torch"), made, return_lse=True, **options)


@pytest.mark.parametrize("name", STEPS)
def test_lists(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other kernel is chosen; q may be a pair."""
    word, step = stand_in(monkeypatch, tmp_path), STEPS[name]
    found = listed(step, kernel="attn_fwd_mma", config=SMALL)
    step.check(*map(to_numpy, found), 2e-2)
    pair = listed(step, is_pair=True, kernel="attn_fwd_mma", config=SMALL)
    assert all(torch.equal(a, b) for a, b in zip(found, pair, strict=True)) and word[0] == 0


def operation(listed: bool, **changes: Any) -> AttentionKVCache:
    """64 sequences with 4096 keys and 128 heads, or two lists of 2048 for each."""
    step = AttentionKVCache(BF16, 64, 1, 4096, 128, 1, 576, 512, 4096, 64, form="table", table=64, kv_element=FP8_DS_MLA)
    physical = {"spec": Spec(keys=KeyLists(True, 1, 1, True)), "keys": ListSizes(2048, 0, 0, True), "form": "rows", "q_len": 2}
    return of(step, **(physical if listed else {"spec": Spec(mask=Causal())}) | changes)


WINDOW = Spec(mask=And(Causal(), Window(100)), score=Softcap(30.0), scale=-0.1, return_lse=True)
COMPILED = {
    "step": operation(False),
    "chunks": operation(False, q_len=512, ragged=True, total_q=4096, spec=WINDOW, element=FP16, sinks=True, kv_begin=True),
    "16 heads": operation(False, heads=16, causal_each=True, spec=Spec(return_lse=True)),
    "rows": operation(True, q_rope=True, spec=Spec(keys=KeyLists(True, 1, 1, True), return_lse=True, score=Softcap(30.0))),
    "table": operation(True, form="table", spec=dataclasses.replace(WINDOW, keys=KeyLists(True, 1, 1, False)), sinks=True),
}


@pytest.mark.parametrize("name", [x if x in ("step", "rows") else pytest.param(x, marks=pytest.mark.slow) for x in COMPILED])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_nothing_spills(arch: str, name: str) -> None:
    if not matrix.is_known(arch):
        pytest.skip("an older NVRTC")
    op, device = COMPILED[name], TYPICAL[arch]
    found = select(op, device)
    binary = compiler.compile(found.kernel.render(op, found.config, arch))
    assert binary.spill_bytes == 0 and found.kernel.legal(found.config, op, device) is None, found.config
    names = instructions(binary.cubin)
    wanted = {"LDGSTS", "LDSM", "HMMA", *["F2FP"] * (arch != "sm_80")}
    assert names is None or wanted <= {x.split(".")[0] for x in names}
    assert names is None or (arch == "sm_80") == (not any("E4M3" in x for x in names))
