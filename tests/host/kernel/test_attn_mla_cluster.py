"""Pairs of blocks of attn_mla.cu that are clusters, thread by thread on the CPU: they give the bits of those that are not."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from rawattn import ProblemError
from rawattn.compile import compiler
from rawattn.kernel.attn_mla import ATTN_MLA, AttnMlaConfig
from rawattn.kernel.attn_mla_listed import ATTN_MLA_LISTED
from rawattn.runtime.select import select
from tests import emulator
from tests.caches import Recorded
from tests.emulator.gpu import stand_in
from tests.host.kernel.test_attn_decode_wide import same
from tests.host.kernel.test_attn_mla import (
    CLUSTER,
    HOPPER,
    MOST_SPILLED,
    OPTIONS,
    RAGGED,
    SAME,
    TWO,
    MlaRunner,
    drawn,
    of,
    op_of,
    run,
)
from tests.host.kernel.test_attn_mla_records import COMPILED, STEPS
from tests.host.kernel.test_attn_mla_rows import attend

__all__ = ["run"]
LENGTHS = tuple((1, n) for n in (70, 0, 1, 64, 200, 129))
WIDE = of(SAME, heads=126, lengths=LENGTHS)
CASES: dict[str, tuple[Any, ...]] = {  # a case, the grid, and options
    "126 heads": (WIDE, 4, {}),
    "one pair": (of(WIDE, sinks=True, softcap=5.0), 2, {}),
    "65 heads": (of(WIDE, heads=65, lengths=LENGTHS[:3]), 4, {}),
    "pages of 128": (of(WIDE, page_size=128, lengths=((1, 300), (1, 97))), 2, {}),
    "dense": (of(WIDE, form="dense", page_size=301, lengths=((1, 70), (1, 300))), 4, {}),
    "states parked": (of(WIDE, heads=128, lengths=((1, 700), (1, 7), (1, 390))), 2, {"split": 128}),
    "works cut": (of(WIDE, heads=128, lengths=((1, 700), (1, 7), (1, 390))), 6, {"split": 128}),
    "even": (of(WIDE, lengths=((1, 300), (1, 70), (1, 0))), 6, {"split": "even"}),
    "one block has no rows": (of(SAME, heads=40, lengths=((4, 200), (4, 70))), 4, {"split": 64}),
    "rows see other tiles": (of(SAME, heads=64, lengths=((2, 129), (2, 149), (2, 65)), window=(20, 0)), 2, {"split": 64}),
    "ragged": (of(RAGGED, sinks=True), 4, {}),
    "begins": (of(RAGGED, whole=False, lengths=((9, 70), (3, 200), (1, 5), (2, 130)), begins=(33, 129, 0, 70)), 2, {}),
}
RECORDS = Recorded(LENGTHS, False, page_size=64, heads=126, whole=True)
CASES |= {
    "records": (RECORDS, 4, {}),
    "records, one pair": (of(RECORDS, page_size=1, sinks=True, softcap=5.0, lengths=((1, 64), (1, 130), (1, 63))), 2, {}),
    "records, states": (of(RECORDS, heads=128, page_size=8, lengths=((1, 450), (1, 7), (1, 200))), 2, {"split": 128}),
    "records, works cut": (of(RECORDS, heads=128, form="indptr", lengths=((1, 700), (1, 7), (1, 390))), 6, {"split": 128}),
    "records, even": (of(RECORDS, form="dense", page_size=301, lengths=((1, 300), (1, 70), (1, 0))), 6, {"split": "even"}),
    "records, window": (of(RECORDS, heads=64, dtype="fp16", lengths=((2, 129), (2, 149)), window=(20, 0)), 2, {"split": 64}),
    "records, begins": (
        of(RECORDS, heads=9, ragged=True, whole=False, lengths=((9, 70), (3, 200), (1, 5), (2, 130)), begins=(33, 129, 0, 70)),
        2, {},
    ),
}  # fmt: skip
FEW = ("records", "records, states", "126 heads", "65 heads", "states parked", "works cut", "rows see other tiles")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in CASES])
def test_same_bits(name: str, run: MlaRunner) -> None:
    case, grid, options = CASES[name]
    same(run.check(case, CLUSTER, grid, **options), run(case, TWO, grid, **options))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "rows" else pytest.mark.slow) for name in STEPS])
def test_lists_of_records(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    word, step = stand_in(monkeypatch, tmp_path, sm_count=4), STEPS[name]
    step = of(step, case=of(step.case, heads=max(40, step.case.heads)))
    same(attend(step, CLUSTER), attend(step, TWO))
    assert word[0] == 0


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn())
def test_drawn(run: MlaRunner, given: tuple[Any, ...]) -> None:
    case, _, grid, split = given
    case = case if case.page_size >= 64 else of(case, page_size=64)
    same(run.check(case, CLUSTER, grid, split=split), run(case, TWO, grid, split=split))


@pytest.mark.parametrize("kind", [SAME, RECORDS], ids=["pages", "records"])
@pytest.mark.parametrize("late", [5, 130, 290, 389, 514, 674])
def test_a_late_lane_finds_its_phase(late: int, kind: Any, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either block."""
    case = of(kind, heads=70, lengths=((1, 390), (1, 3), (1, 70)))
    wanted = run(case, CLUSTER, 2, split=128)
    monkeypatch.setattr(emulator, "late_thread", late)
    same(run(case, CLUSTER, 2, split=128), wanted)


@pytest.mark.parametrize("name", ["states parked", "ragged", "records, works cut"])
def test_lengths_that_change_while_blocks_look(name: str, run: MlaRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both blocks of a cluster end, write nowhere else, and find what they find where nothing changes."""
    case, grid, options = CASES[name]
    wanted = run(case, CLUSTER, grid, **options)
    for after in (0, 1, 2, 5, 9, 14, 40, 90, 150):
        with monkeypatch.context() as patch:
            patch.setattr(emulator, "torn_after", after)
            run(case, CLUSTER, grid, **options)
    same(run(case, CLUSTER, grid, **options), wanted)


FORMS = {name: op_of(**options) for name, options in OPTIONS.items() if name != "small pages"}
FORMS |= {f"records, {name}": op for name, op in COMPILED.items() if op.heads > 64}


@pytest.mark.parametrize(
    "name", [x if x in ("table", "records, rows") else pytest.param(x, marks=pytest.mark.slow) for x in FORMS]
)
def test_machine_code(name: str) -> None:
    """Nothing waits for memory at each tile: the barriers of the cluster at the beginning and the end are all that does."""
    op = FORMS[name]
    kernel = ATTN_MLA if op.keys is None else ATTN_MLA_LISTED
    binary = compiler.compile(kernel.render(op, CLUSTER, "sm_90a"))
    assert binary.spill_bytes <= MOST_SPILLED and not binary.advisories
    text = compiler.disassemble(binary.cubin, "-c")
    assert text.count("MEMBAR.ALL.GPU") == text.count("UCGABAR_ARV") == 2
    assert ("STAS.128" if "records" in name else "UTMALDG.5D.MULTICAST") in text


def test_refusals() -> None:
    for op, config in ((op_of(page=32), CLUSTER), (op_of(page=1), CLUSTER), (op_of(), AttnMlaConfig(1, cluster=True))):
        with pytest.raises(ProblemError, match="attn_mla cannot run here: cluster is True"):
            select(op, HOPPER, "attn_mla", config)
