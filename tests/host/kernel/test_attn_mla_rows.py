"""attn_mla.cu where threads copy keys row by row, run thread by thread on the CPU: over lists of keys, and over pages below 8 keys."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import UnsupportedError
from rawattn.compile import compiler
from rawattn.kernel.attn_mla import ATTN_MLA, AttnMlaConfig
from rawattn.kernel.attn_mla_listed import ATTN_MLA_LISTED
from rawattn.operation import AttentionKVCache
from rawattn.operation.keys import KeyLists, ListSizes
from rawattn.runtime.select import select
from rawattn.testing import _move
from rawattn.variant.mask import Full
from tests import emulator
from tests.emulator.gpu import stand_in
from tests.host.kernel.test_attn_decode_wide import same
from tests.host.kernel.test_attn_mla import HOPPER, MOST_SPILLED, ONE, RAGGED, SAME, TWO, WINDOW, MlaRunner, of, op_of
from tests.key_lists import WRONG, ListedStep, Lists, to_numpy

torch = pytest.importorskip("torch")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> MlaRunner:
    return MlaRunner(monkeypatch, tmp_path)


PAGES: dict[str, tuple[Any, ...]] = {
    "pages of 1": (of(SAME, page_size=1), ONE, 2),
    "pages of 2, a tile each": (of(SAME, page_size=2, lengths=((1, 3), (1, 64), (1, 7), (1, 1))), ONE, 2),
    "pages of 4, cut": (of(SAME, page_size=4, form="indptr", layout="HND", lengths=((1, 1300), (1, 600))), ONE, 3),
    "begins, pairs": (of(RAGGED, page_size=1, heads=126, whole=False, lengths=((2, 70), (1, 200)), begins=(33, 129)), TWO, 4),
}


@pytest.mark.parametrize("name", PAGES)
def test_small_pages(name: str, run: MlaRunner) -> None:
    """The bits are those of larger pages."""
    case, *rest = PAGES[name]
    wanted = run.check(case, *rest)
    same(run(of(case, page_size=16), *rest), wanted)


FEW = of(SAME, lengths=((1, 150), (1, 70)), heads=3)
PACKED = of(RAGGED, heads=5, lengths=((3, 150), (0, 5), (1, 0), (2, 70), (2, 64)))
STEPS = {
    "table": ListedStep(of(FEW, page_size=16), Lists(90)),
    "packed, causal": ListedStep(PACKED, Lists(70, counts=True, empty=True, same=0.5)),
    "rows": ListedStep(PACKED, Lists(65), physical=True),
    "rows, pages of 3": ListedStep(of(FEW, page_size=3, lengths=((2, 60), (2, 90))), Lists(60, counts=True), physical=True),
    "dense, half precision": ListedStep(of(FEW, form="dense", page_size=151, dtype="fp16", sinks=True, softcap=3.0), Lists(40)),
    "end to end": ListedStep(of(PACKED, form="indptr", layout="HND", page_size=2), Lists(40)),
    "begins": ListedStep(of(PACKED, begins=(31, 2, 0, 9, 5), causal=(0, 1, 1, 1, 0)), Lists(60, counts=True)),
    "pairs": ListedStep(of(FEW, heads=100, lengths=((1, 90),)), Lists(70)),
    "many keys": ListedStep(of(FEW, lengths=((1, 700), (1, 1100))), Lists(1300)),
}
SLOW = ("rows, pages of 3", "end to end", "pairs")


def attend(step: ListedStep, config: AttnMlaConfig | None = None, **changes: Any) -> Any:
    case, sinks = step.case, step.case.sink_logits()
    config = config or AttnMlaConfig(2 if case.heads > 64 else 1)
    options: dict[str, Any] = {"kernel": "attn_mla", "config": config, "window": case.window, "softcap": case.softcap}
    options["sinks"] = None if sinks is None else _move(sinks, "torch", "cpu")
    made, q = step.step(lambda x: _move(x, "torch", "cpu"), "torch"), _move(case.rows(case.heads, 576, 1), "torch", "cpu")
    return rawattn.attention_kvcache(q, step.cache("torch"), made, return_lse=True, **(options | changes))


def check(step: ListedStep, found: Any) -> None:
    step.check(*map(to_numpy, found), {"bf16": 2e-2, "fp16": 4e-3}[step.case.dtype])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in STEPS])
def test_lists(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no list names are NaN."""
    word = stand_in(monkeypatch, tmp_path, sm_count=5)
    check(STEPS[name], attend(STEPS[name]))
    assert word[0] == 0
