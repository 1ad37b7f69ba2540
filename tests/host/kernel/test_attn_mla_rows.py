"""attn_mla.cu where threads copy keys row by row, thread by thread on the CPU: over lists of keys, and pages below 8 keys."""

from __future__ import annotations

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


@pytest.mark.parametrize("lengths", [((1, 130), (1, 130)), ((1, 1100), (1, 1100))])
def test_all_keys_have_the_bits_of_the_plain_step(lengths: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and splits are the same. In another order sums round otherwise."""
    stand_in(monkeypatch, tmp_path, sm_count=5)
    most = lengths[0][1]
    numbers = np.tile(np.arange(most, dtype=np.int32), (2, 1))
    monkeypatch.setattr(Lists, "of", lambda *_: (numbers, None))
    step = ListedStep(of(SAME, lengths=lengths), Lists(most))
    q, cache = _move(step.case.rows(16, 576, 1), "torch", "cpu"), step.cache("torch")
    wanted = rawattn.attention_kvcache(q, cache, step.case.step("torch"), kernel="attn_mla", config=ONE, return_lse=True)
    same(attend(step), wanted)
    numbers[:] = numbers[:, ::-1].copy()
    assert not attend(step)[1].equal(wanted[1])


def test_even_splits_of_lists(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, sm_count=5)
    check(STEPS["many keys"], attend(STEPS["many keys"], split="even"))


@pytest.mark.parametrize("late", [3, 37, 130, 170, 290, 350, 383])
def test_a_late_lane_finds_its_phase(late: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that load, and of those that wait for them; works are short."""
    stand_in(monkeypatch, tmp_path, sm_count=1)
    step = ListedStep(of(PACKED, lengths=((3, 150), (1, 64), (2, 30))), Lists(130, counts=True, empty=True))
    wanted = attend(step)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(attend(step), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("late", [5, 130, 290])
def test_a_late_lane_folds(late: int, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked states come through a stage while others are loaded; each tile is a split."""
    case = of(SAME, page_size=1, heads=40, lengths=((1, 330), (1, 3), (1, 200)))
    wanted = run.check(case, ONE, 2, split=64)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, ONE, 2, split=64), wanted)


@pytest.mark.parametrize("wrong", ["number", "count"])
def test_violations(wrong: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond a sequence are no keys, and said so, and a count is cut; -1 is none without a word."""
    word, step = stand_in(monkeypatch, tmp_path), ListedStep(PACKED, Lists(20, wrong=0.3 * (wrong == "number"), none=0.5))
    if wrong == "count":
        step = of(step, lists=of(step.lists, counts=True))
        numbers, counts = step.numbers
        assert counts is not None
        counts[0], counts[3] = WRONG, -5
        numbers[3] = -1
        places = Lists.places
        monkeypatch.setattr(Lists, "of", lambda *_: (numbers, counts))
        monkeypatch.setattr(Lists, "places", lambda self, n, c, *rest: places(self, n, np.clip(c, 0, self.most), *rest))
    check(step, attend(step))
    assert word[0] == 256


def listed(heads: int = 128, physical: bool = False, counts: bool = False, **changes: Any) -> AttentionKVCache:
    op = op_of(heads=heads, kv_len=65536, batch=4, **changes)
    spec = of(op.spec, keys=KeyLists(True, 1, 1, physical), **({"mask": Full()} if physical else {}))
    return of(op, spec=spec, keys=ListSizes(2048, 0, 0, counts), form="rows" if physical else op.form)


OPERATIONS = {
    "rows": listed(physical=True),
    "rows, 16 heads": listed(16, physical=True, q_rope=True),
    "table": listed(counts=True),
    "dense, ragged": listed(form="dense", page=70000, ragged=True, total_q=64, counts=True, sinks=True, mask=WINDOW),
    "begins": listed(kv_begin=True, causal_each=True, form="indptr", mask=Full()),
    "pages of 1": op_of(heads=128, page=1, table=70000),
    "pages of 1, 16 heads": op_of(heads=16, page=1, table=70000),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_spills(name: str) -> None:
    """Products are not serialised, and next to nothing is spilled."""
    op = OPERATIONS[name]
    kernel = ATTN_MLA if op.keys is None else ATTN_MLA_LISTED
    config, *_ = kernel.candidates(op, HOPPER)
    binary = compiler.compile(kernel.render(op, config, "sm_90a"))
    assert binary.spill_bytes <= MOST_SPILLED and not binary.advisories
    assert compiler.compile(kernel.render_fold(op, config, "sm_90a")[0]).spill_bytes == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_who_is_chosen(name: str) -> None:
    op = OPERATIONS[name]
    chosen = select(op, HOPPER)
    assert chosen.kernel is (ATTN_MLA if op.keys is None else ATTN_MLA_LISTED)
    assert chosen.config == (TWO if op.heads > 64 else ONE) and chosen.slow is None


def test_blocks_are_refused() -> None:
    op = listed()
    blocks = of(op, spec=of(op.spec, keys=KeyLists(False, 1, 64)), keys=ListSizes(32, 1, 1))
    with pytest.raises(UnsupportedError, match="it takes lists for each token, TopK, not for blocks of queries"):
        select(blocks, HOPPER, "attn_mla")
