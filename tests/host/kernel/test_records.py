"""attn_fwd_mma over records of 656 bytes, run thread by thread on the CPU, beside attention over what they say."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

import rawattn
from rawattn.kernel.attn_fwd_mma import AttnFwdMmaConfig
from rawattn.testing import _move
from tests.caches import Recorded
from tests.emulator.gpu import stand_in
from tests.host.kernel.test_attn_fwd_kvcache import attend, check
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
