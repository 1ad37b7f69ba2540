"""attn_mla.cu over caches of records, thread by thread on the CPU: steps and lists beside attention over what the records say."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import FP8_DS_MLA, UnsupportedError
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_mla import ATTN_MLA
from rawattn.kernel.attn_mla_listed import ATTN_MLA_LISTED
from rawattn.runtime.select import select
from rawattn.testing import _move
from rawattn.variant.element import E4M3
from tests import emulator
from tests.caches import Recorded
from tests.emulator.gpu import stand_in
from tests.host.kernel.test_attn_decode_wide import same
from tests.host.kernel.test_attn_mla import CLUSTER, HOPPER, ONE, OPTIONS, TWO, MlaRunner, of, op_of
from tests.host.kernel.test_attn_mla_rows import OPERATIONS, attend, check
from tests.host.kernel.test_compile_portable import instructions
from tests.key_lists import ListedStep, Lists

torch = pytest.importorskip("torch")
SAME = Recorded(((1, 70), (1, 200), (1, 0)), False, page_size=64, heads=16, whole=True)
RAGGED = of(SAME, heads=9, ragged=True, lengths=((9, 70), (0, 7), (3, 2), (20, 130)))
CASES: dict[str, tuple[Any, ...]] = {
    "table": (SAME, ONE, 2),
    "pages of 1, a tile each": (of(SAME, page_size=1, lengths=((1, 3), (1, 64), (1, 7), (1, 1))), ONE, 2),
    "splits, cut": (of(SAME, lengths=((1, 1300), (1, 600)), page_size=256), ONE, 3),
    "end to end": (of(SAME, page_size=8, form="indptr", lengths=((1, 75), (1, 128))), ONE, 2),
    "dense": (of(SAME, form="dense", page_size=301, lengths=((1, 70), (1, 300)), causal=False), ONE, 2),
    "pairs of blocks": (of(SAME, heads=126, lengths=((1, 70), (1, 100)), sinks=True), TWO, 4),
    "chunks": (of(RAGGED, sinks=True, softcap=5.0), TWO, 4),
    "window, half precision": (of(SAME, dtype="fp16", heads=9, lengths=((9, 700), (9, 100)), window=(300, 0)), TWO, 4),
    "begins": (of(RAGGED, whole=False, lengths=((9, 70), (3, 200), (1, 5), (2, 130)), begins=(33, 129, 0, 70)), ONE, 3),
    "causal for some": (of(SAME, heads=9, ragged=True, lengths=((9, 300), (9, 100)), causal=(0, 1), page_size=1), ONE, 4),
}
FEW = ("table", "pages of 1, a tile each", "chunks", "begins")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> MlaRunner:
    return MlaRunner(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in CASES])
def test_public_call(name: str, run: MlaRunner) -> None:
    """Records that do not count are NaN, in each of their parts."""
    run.check(*CASES[name])


def test_bits(run: MlaRunner) -> None:
    """They are those of any pages, on any grid, of q as a pair, and of a sequence alone."""
    case = of(SAME, heads=40, lengths=((2, 300), (2, 7), (2, 390)))
    wanted = run.check(case, ONE, 1, split=128)
    same(run(case, TWO, 4, split=128), wanted)
    for page_size in (1, 16):
        same(run(of(case, page_size=page_size), ONE, 3, split=128), wanted)
    same(run(of(case, form="dense", page_size=701), TWO, 6, split=128), wanted)
    q, cache, step = _move(case.rows(40, 576, 1), "torch", "cpu"), case.cache("torch"), case.step("torch")
    options: dict[str, Any] = {"kernel": "attn_mla", "return_lse": True, "split": 128}
    same(rawattn.attention_kvcache((q[..., :512].contiguous(), q[..., 512:].contiguous()), cache, step, **options), wanted)
    alone = rawattn.Step(step.kv_lens[2:], step.page_table[2:])
    same(rawattn.attention_kvcache(q[2:], cache, alone, **options), [x[2:] for x in wanted])


@pytest.mark.slow
def test_even_splits(run: MlaRunner) -> None:
    run.check(of(SAME, lengths=((1, 400), (1, 70), (1, 0), (1, 200))), ONE, 7, split="even")


@pytest.mark.parametrize("late", [3, 130, 170, 290, 383])
def test_a_late_lane_finds_its_phase(late: int, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that ask for records and make numbers, and of those that wait for them; works are short."""
    case = of(SAME, heads=5, lengths=((1, 70), (1, 3), (1, 64), (1, 1), (1, 200)))
    wanted = run(case, ONE, 1)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, ONE, 1), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("late", [5, 130, 290])
def test_a_late_lane_folds(late: int, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked states come through a stage while others are loaded; each tile is a split."""
    case = of(SAME, heads=40, lengths=((1, 330), (1, 3), (1, 200)))
    wanted = run.check(case, ONE, 2, split=64)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, ONE, 2, split=64), wanted)


def test_hostile_pages_are_said(run: MlaRunner) -> None:
    wanted = run(SAME, ONE, 2)
    for entry in (-1, 2147480000):
        o, lse, word = run(SAME, ONE, 2, edit=lambda given, entry=entry: given["page_table"].__setitem__((0, 0), entry))
        assert word == 4 and o[1:].equal(wanted[0][1:]) and lse[1:].equal(wanted[1][1:])


PACKED = of(RAGGED, heads=5, lengths=((3, 150), (0, 5), (1, 0), (2, 70), (2, 64)))
STEPS = {
    "table": ListedStep(of(PACKED, page_size=16), Lists(70, counts=True, empty=True, same=0.5)),
    "rows": ListedStep(of(PACKED, page_size=61), Lists(65), physical=True),
    "rows, pairs": ListedStep(of(SAME, heads=100, lengths=((2, 90), (2, 30))), Lists(70), physical=True),
    "begins": ListedStep(of(PACKED, begins=(31, 2, 0, 9, 5), causal=(0, 1, 1, 1, 0)), Lists(60, counts=True)),
    "many keys": ListedStep(of(SAME, heads=3, lengths=((1, 700), (1, 1100))), Lists(1300)),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if "rows" in name else pytest.mark.slow) for name in STEPS])
def test_lists(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no list names are NaN."""
    word = stand_in(monkeypatch, tmp_path, sm_count=5)
    check(STEPS[name], attend(STEPS[name]))
    assert word[0] == 0


def test_all_keys_have_the_bits_of_the_plain_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, sm_count=5)
    numbers = np.tile(np.arange(130, dtype=np.int32), (2, 1))
    monkeypatch.setattr(Lists, "of", lambda *_: (numbers, None))
    step = ListedStep(of(SAME, lengths=((1, 130), (1, 130))), Lists(130))
    q, cache = _move(step.case.rows(16, 576, 1), "torch", "cpu"), step.cache("torch")
    wanted = rawattn.attention_kvcache(q, cache, step.case.step("torch"), kernel="attn_mla", return_lse=True)
    same(attend(step), wanted)


def test_wrong_numbers_are_said(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers beyond a sequence are no keys; -1 is none without a word."""
    word, step = stand_in(monkeypatch, tmp_path), ListedStep(PACKED, Lists(20, wrong=0.3, none=0.5))
    check(step, attend(step))
    assert word[0] == 256


MOST_SPILLED = 128  # bytes: where works are found and states folded
RECORDS: dict[str, Any] = {"kv_element": FP8_DS_MLA}
COMPILED = {
    **{name: of(op, **RECORDS) for name, op in OPERATIONS.items()},
    **{f"step, {name}": of(op_of(**OPTIONS[name]), **RECORDS) for name in ("table", "pair of q", "ragged", "end to end")},
}


@pytest.mark.parametrize("name", COMPILED)
def test_spills(name: str) -> None:
    """Products are not serialised, and next to nothing is spilled. Records are asked for by TMA."""
    op = COMPILED[name]
    kernel = ATTN_MLA if op.keys is None else ATTN_MLA_LISTED
    config, *_ = kernel.candidates(op, HOPPER)
    binary = compiler.compile(kernel.render(op, config, "sm_90a"))
    assert binary.spill_bytes <= MOST_SPILLED and not binary.advisories
    names = instructions(binary.cubin)
    assert names is None or {"UBLKCP", "HGMMA"} <= {x.split(".")[0] for x in names}


@pytest.mark.parametrize("name", COMPILED)
def test_who_is_chosen(name: str) -> None:
    op = COMPILED[name]
    chosen = select(op, HOPPER)
    assert chosen.kernel.name == "attn_mla" and chosen.config == (CLUSTER if op.heads * op.q_len > 64 else ONE)


def test_refusals() -> None:
    op = COMPILED["step, table"]
    for changes, said in (
        ({"kv_element": E4M3}, "it takes caches in the format of q, bf16, and of records"),
        ({"layout": op.layout._replace(unaligned="k_cache lies apart")}, "k_cache lies apart"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            select(of(op, **changes), HOPPER, "attn_mla")
    with pytest.raises(UnsupportedError, match="it needs a Hopper GPU"):
        select(op, TYPICAL["sm_80"], "attn_mla")
