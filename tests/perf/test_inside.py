"""perf.sass, counters, ablate, gate, prove and occupancy without a GPU: what they parse, change, decide and compile."""

from __future__ import annotations

import ast
import collections
import csv
import dataclasses
import io
import itertools
import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from perf import ablate, counters, gate, occupancy, prove, sass
from perf.lib import altered, benchmark, compiling, machine, machine_code, report, sets
from perf.lib.report import Result, Run
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import attn_fwd_mma
from rawattn.kernel.attn_bwd_mma import ATTN_BWD_MMA
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.operation.operand import PLAIN
from rawattn.runtime.select import select
from rawattn.variant.field import Field

CASE = sets.dense(4, 4096, 16, 128, True)
OP = sets.operation(CASE)
DEVICE = TYPICAL["sm_90a"]
CONFIG = AttnFwdConfig(128, 128, 2, 2)

LISTING = """\
        .type           attn_fwd,@function
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR12], RZ, !UPT ;
.L_x_1:
        /*0020*/              @!P0 SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R3+URZ], R4 ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR12], R88 ;
        /*0040*/                   MUFU.EX2 R5, R6 ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16].tnspB, R24 ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR16].tnspB, R24 ;
        /*0080*/              @!P3 BRA `(.L_x_3) ;
        /*0090*/                   MUFU.RCP R7, R8 ;
        /*00a0*/                   BRA `(.L_x_2) ;
.L_x_3:
        /*00b0*/                   EXIT ;
"""


def test_listing_is_parsed() -> None:
    names, loops = machine_code.parse(LISTING)
    assert len(names) == 12 and names[0] == "LDC" and names[-1] == "EXIT" and loops == [(2, 6), (7, 10)]
    assert [machine_code.family(name) for name in machine_code.main_loop(LISTING)] == [
        "SYNCS.PHASECHK",
        "HGMMA",
        "MUFU.EX2",
        "HGMMA",
        "BRA",
    ]
    rows = machine_code.summary(
        {"this": LISTING, "that": LISTING.replace("MUFU.EX2 R5, R6 ;", "MUFU.EX2 R5, R6 ;\n/*0048*/ FADD R1, R2 ;")}
    )
    table = {row[0]: row[1:] for row in rows}
    assert table["HGMMA"] == ["4", "2", "4", "2", "+0"] and table["FADD"] == ["0", "0", "1", "1", "+1"]
    assert table["together"] == ["12", "5", "13", "6", "+1"] and rows[1][0] == "together"
    assert machine_code.main_loop("") == []


def test_machine_code_of_a_kernel(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    try:
        machine_code.disassemble(sass.build(CASE, "128x128s2q2").cubin)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert sass.main(["paper/18", "--config", "128x128s2q2", "--out", str(tmp_path)]) == 0
    assert "HGMMA" in (tmp_path / "kernel.sass").read_text()
    assert sass.main(["paper/18", "--config", "128x64s2q2", "--against", str(tmp_path / "kernel.cubin")]) == 0
    second = capsys.readouterr().out.split("instruction")[2]
    table = {line.split()[0]: line.split()[1:] for line in second.splitlines()[1:]}
    assert table["HGMMA"] == ["24", "12", "32", "16", "+4"], (
        "head_dim / 16 and tile_kv / 16 of them in the loop, each once outside"
    )
    assert int(table["MUFU.EX2"][1]) >= 32
    with pytest.raises(ValueError, match="cannot run"):
        sass.build(CASE, "192x256")


RAW = """\
==PROF== Connected to process 7
"ID","Process ID","Process Name","Host Name","Kernel Name","launch__registers_per_thread","lts__t_sector_hit_rate.pct",\
"sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active","l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio"
"","","","","","register/thread","%","%","","inst","inst","inst"
"0","7","python","127.0.0.1","attn_fwd","168","93.5","71.25","1,024","1","0.5","2.25"
"""
SOURCE = """\
"attn_fwd"
"#","Address","Source","Warp Stall Sampling (All Samples)","# Samples","stall_wait","stall_math","stall_math (Not Issued)"
"1","0x10","  HGMMA.64x128x16 R88","400","400","10","390","800"
"2","0x20","  FADD R1, R2","1,500","1500","1400","100","0"
"3","0x30","  EXIT","0","0","","",""
"""


def test_counters_are_parsed_and_judged() -> None:
    metrics = counters.parse_raw(RAW)
    assert metrics["launch__registers_per_thread"] == 168 and metrics[counters.CONFLICTS] == 1024
    rows = {row[0]: row[1:] for row in counters.verdict(metrics | {"l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": 102400.0})}
    assert rows["conflicts, % of shared wavefronts"][0] == "1.00"
    assert rows["tensor pipe active, %"] == ["71.25", ">= 80", "off"]
    assert rows["shared-memory bank conflicts"] == ["1024", "<= 0", "off"]
    assert rows["L2 hit rate, %"] == ["93.5", "", ""]
    assert [name for name in rows if name.startswith("stalled")] == ["stalled: math_pipe_throttle", "stalled: wait"]
    add, multiply = counters.parse_source(SOURCE)
    assert add == counters.Instruction(0x10, "FADD R1, R2", 1500, {"wait": 1400, "math": 100}) and add.reason == "wait"
    assert (multiply.offset, multiply.samples, multiply.reason) == (0, 400, "math")
    assert counters.parse_raw("==ERROR== none") == {} and counters.parse_source("") == []
    kernel = counters.kernel_of(sets.pick("masks-bwd/0"))
    assert [name for name in ("attn_bwd_delta", "attn_bwd", "attn_bwd_convert", "attn_bwd_mma") if re.search(kernel, name)] == [
        "attn_bwd", "attn_bwd_mma"
    ]  # fmt: skip
    assert counters.kernel_of(sets.pick("paper/21")) == "attn_"
    assert next(csv.reader(io.StringIO(RAW.splitlines()[1])))[0] == "ID"


def test_spills_are_judged() -> None:
    rows = [{row[0]: row[1:] for row in counters.verdict({}, spills)} for spills in (0, 16, None)]
    assert rows[0]["bytes spilled"] == ["0", "<= 0", "ok"] and rows[1]["bytes spilled"] == ["16", "<= 0", "off"]
    assert "bytes spilled" not in rows[2]


def test_roofline_position() -> None:
    """At half the tensor cores' rate and a tenth of the memory's, the ridge is at a fifth of the intensity."""
    flops, units = 4096 * 132 * 1000, 132
    metrics = {"dram__bytes_read.sum": 3e6, "dram__bytes_write.sum": 1e6, "sm__cycles_elapsed.max": 2000.0}
    metrics["gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"] = 10.0
    intensity = flops / 4e6
    rows = counters.roofline(metrics, flops, units)
    assert rows[0][1:] == [f"{intensity:.0f}", f"ridge {intensity / 5:.0f}", "bound by tensor cores"]
    assert rows[1][:2] == ["roofline: share of the roof, %", "50.0"]
    metrics["gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"] = 90.0
    assert counters.roofline(metrics, flops, units)[0][3] == "bound by memory"
    assert counters.roofline({}, flops, units) == []


def test_stalls_by_source_line() -> None:
    """Each instruction of a real kernel has its line, by the repository's paths; a wait inside a wrapper is its caller's."""
    source = ATTN_FWD.render(OP, CONFIG, DEVICE.arch)
    try:
        listing = compiler.disassemble(compiler.compile(source).cubin, "-c", "-gi")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    places, texts = counters.source_lines(listing, source), {source.name: source.text, **dict(source.headers)}
    count = len(machine_code.parse(listing)[0])
    assert sorted(places) == [16 * i for i in range(count)]
    found = {offset: texts[path].splitlines()[int(line) - 1] for offset, at in places.items() for path, line in [at.split(":")]}
    assert not [at for at in places.values() if at.startswith(counters.WRAPPERS)]
    names = machine_code.parse(listing)[0]
    multiplies = ["multiply(" in found[16 * i] for i, name in enumerate(names) if name.startswith("HGMMA")]
    assert sum(multiplies) >= 0.75 * len(multiplies) > 0, "the first of a chain may have the line of what is before it"
    samples = [counters.Instruction(offset, "", 10, {"wait": 9, "selected": 1}) for offset in list(places)[:5]]
    samples += [counters.Instruction(16 * i, "", 100, {"math": 100}) for i, name in enumerate(names) if name.startswith("HGMMA")]
    rows = counters.stalled_lines(samples, places, source)
    assert [row[0] for row in rows[1:3]] == ["math", "math"] and "multiply(" in rows[1][4] and rows[-1][0] == "wait"
    assert "selected" not in [row[0] for row in rows]


def test_counters_without_ncu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters.glob, "glob", lambda pattern: [])
    with pytest.raises(SystemExit, match=r"developer\.nvidia\.com/nsight-compute"):
        counters.main([])


def test_patches_apply() -> None:
    """Each changes the source, and compiles in what the library chooses for operations with and without turns."""
    names = sorted(path.stem for path in altered.PATCHES.glob("*.patch"))
    assert len(names) >= 8 and set(ablate.LEAKS) < set(names)
    sources = dict[str, compiler.Source]()
    for case in (CASE, sets.SETS["paper"][30]):
        op = sets.operation(case)
        config = select(op, DEVICE).config
        plain = ATTN_FWD.render(op, config, DEVICE.arch)
        patched = {f"{name}, {config}": altered.Patched(name).render(op, config, DEVICE.arch) for name in names}
        assert len({plain.key, *(source.key for source in patched.values())}) == 1 + len(names)
        sources |= patched
    backward = sets.operation(sets.SETS["paper-bwd"][18])
    config = select(backward, DEVICE, "attn_bwd_mma").config
    of_gradients = {
        name: altered.patched_bwd_mma(name).lower(backward, config, DEVICE).launches[1].source
        for name in ablate.patches("attn_bwd_mma")
    }
    sources |= of_gradients
    with compiling.Pool(2) as pool:
        pool.submit(sources.values())
        results = dict(pool.results())
    refused = {name: str(results[source.key]) for name, source in sources.items() if isinstance(results[source.key], Exception)}
    assert not refused
    assert len(of_gradients) >= 2 and not any(results[source.key].spill_bytes for source in of_gradients.values())  # type: ignore[union-attr]


def test_patch_that_does_not_apply() -> None:
    source = ATTN_FWD.render(OP, CONFIG, DEVICE.arch)
    text = (altered.PATCHES / "no_overlap.patch").read_text()
    with pytest.raises(ValueError, match="has not once, but 0 times"):
        altered.patch(altered.patch(source, text), text)
    with pytest.raises(ValueError, match=r"none\.cuh has not once"):
        altered.patch(source, text.replace("attn_fwd.cu", "none.cuh"))


def test_ablations_of_gradients_change_one_launch() -> None:
    op = sets.operation(sets.SETS["paper-bwd"][18])
    config = select(op, DEVICE, "attn_bwd_mma").config
    names = [each.name for each in ablate.ABLATIONS_BWD_MMA]
    assert names[0] == "full" and len({*names}) == len(names) and {"unordered", "one_head", "fenced"} <= {*names}
    plain = ATTN_BWD_MMA.lower(op, config, DEVICE)
    for each in ablate.ABLATIONS_BWD_MMA[1:]:
        found = each.kernel.lower(op, dataclasses.replace(config, **each.config), DEVICE)
        assert found.launches[1] != plain.launches[1] and each.what.endswith(".")
        if not each.config:
            assert (found.launches[0], found.launches[2], found.scratch) == (plain.launches[0], plain.launches[2], plain.scratch)
    assert ATTN_BWD_MMA.lower(op, config, DEVICE) == plain


def test_ablations_leave_the_kernel_alone() -> None:
    before = ATTN_FWD.lower(OP, CONFIG, DEVICE)
    (lazy,) = ablate.LazySoftmax().lower(OP, CONFIG, DEVICE).launches
    assert "using Softmax = LazyRescale;" in dict(lazy.source.headers)["config.cuh"]
    (grouped,) = ablate.OneGroup().lower(OP, CONFIG, DEVICE).launches
    assert grouped.source == before.launches[0].source and grouped.values["l2_head_group"] == 64
    assert grouped.values["last_group"] == 0 and before.launches[0].values["l2_head_group"] != 64
    assert ATTN_FWD.lower(OP, CONFIG, DEVICE) == before


def test_ablations_change_something() -> None:
    names = [each.name for each in ablate.ABLATIONS]
    assert names[0] == "full" and len(set(names)) == len(names) and "static_order" in names and not {*ablate.LEAKS} & {*names}
    assert all(each.what.endswith(".") for each in ablate.ABLATIONS)
    config = AttnFwdConfig(192, 96, 4, 2)
    launches = [
        each.kernel.lower(OP, dataclasses.replace(config, **each.config), DEVICE).launches[0] for each in ablate.ABLATIONS
    ]
    bounds = [each.name for each in ablate.ABLATIONS if each.what.startswith(ablate.BOUND)]
    assert len({(launch.source, str(launch.values)) for launch in launches}) == len(launches) - len(bounds)
    pairs = sets.operation(dataclasses.replace(sets.SETS["scores"][1], q_len=256, kv_len=256))
    config = AttnFwdConfig(192, 64, 4, 1)
    for op, changed in ((pairs, 2), (dataclasses.replace(pairs, layout=PLAIN), 3)):  # nobody waits for tiles of elements alone
        sources = {each.kernel.lower(op, config, DEVICE).launches[-1].source for each in ablate.ABLATIONS if each.name in bounds}
        assert len(sources - {ATTN_FWD.lower(op, config, DEVICE).launches[-1].source}) == changed <= len(bounds) == 3


def gate_run(ratios: dict[str, tuple[float, float, float]]) -> Run:
    return Run({}, {}, results=[Result(label, {}, 1, 1, "events", ratios={"ours": {"cudnn": r}}) for label, r in ratios.items()])


def test_gate_sees_what_got_worse() -> None:
    before = gate_run({"a": (1.10, 1.09, 1.11), "b": (1.10, 1.09, 1.11), "c": (1.10, 1.02, 1.18), "d": (1.1, 1.09, 1.11)})
    now = gate_run(
        {"a": (1.05, 1.04, 1.06), "b": (1.085, 1.08, 1.09), "c": (1.05, 1.04, 1.06), "d": (1.3, 1.2, 1.4), "new": (0.5, 0.4, 0.6)}
    )
    rows, bad = gate.compare(before, now)
    assert bad == ["a against cudnn: 1.100 -> 1.050"]
    assert [row[4:] for row in rows[1:]] == [["-4.5%", "worse"], ["-1.4%", ""], ["-4.5%", ""], ["+18.2%", ""], ["-", "new"]]
    assert "nan" not in report.table(rows)


def test_gate_sees_more_spilled() -> None:
    before, now = (gate_run({"a": (1.1, 1.09, 1.11)}) for _ in range(2))
    before.arguments["spills"], now.arguments["spills"] = {"a": 60, "b": 8}, {"a": 60}
    assert gate.compare(before, now)[1] == []
    now.arguments["spills"] = {"a": 64, "c": 4}
    assert gate.compare(before, now)[1] == ["a: 64 bytes spilled", "c: 4 bytes spilled"]


def test_gate_on_a_slower_machine() -> None:
    """Ratios may fall by as much as the matrix product fell since the recorded run, 4 %, and by no more."""
    before, now = (gate_run({"a": (x, x - 0.01, x + 0.01), "b": (y, y - 0.01, y + 0.01)}) for x, y in ((1.1, 1.1), (1.05, 1.0)))
    before.ceilings, now.ceilings = {"matmul_tflops": 800.0}, {"matmul_tflops": 768.0}
    assert gate.compare(before, now)[1] == ["b against cudnn: 1.100 -> 1.000"]
    assert len(gate.compare(now, before)[1]) == 0


def test_gate_misses_a_peer() -> None:
    """A comparison that was made before and is missing now does not pass silently."""
    before, now = (gate_run({"a": (1.1, 1.09, 1.11), "b": (1.1, 1.09, 1.11)}) for _ in range(2))
    now.results[0].ratios.clear()
    del now.results[1]
    rows, bad = gate.compare(before, now)
    assert [row[-1] for row in rows[1:]] == ["missing", "missing"] and len(bad) == 2


def test_gate_without_peers_compares_with_the_matrix_product() -> None:
    def run(us: float) -> Run:
        timing = report.Timing("ours", us=us, medians=[0.995 * us, us, 1.005 * us])
        return Run({}, {}, {"matmul_tflops": 800.0}, [Result("a", {}, 400 * 10**8, 1, "events", [timing])])

    assert gate.ratios(run(100.0))["a"] == {"matmul": pytest.approx((0.5, 0.5 / 1.005, 0.5 / 0.995))}
    assert gate.compare(run(100.0), run(101.5))[1] == [] and gate.compare(run(101.5), run(100.0))[1] == []
    assert gate.compare(run(100.0), run(104.0))[1] == ["a against matmul: 0.500 -> 0.481"]


def test_gate_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ratio = [1.1]

    def measure(options: Any, device: Any, cases: Any, run: Run, *_: Any) -> None:
        run.results += gate_run({"a": (ratio[0], ratio[0] - 0.01, ratio[0] + 0.01)}).results
        for result in run.results:
            result.case = sets.to_json(CASE)

    monkeypatch.setattr(machine, "gpu", lambda tool: DEVICE)
    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setitem(sets.SETS, "gate", [CASE])
    words = ["--no-tests", "--out", str(tmp_path)]
    assert gate.main(words) == 0 and (tmp_path / "gate.json").exists()
    assert gate.main(words) == 0
    ratio[0] = 1.0
    assert gate.main(words) == 1 and "1.100 -> 1.000" in capsys.readouterr().out
    assert gate.main([*words, "--update"]) == 1 and gate.main(words) == 0


def cycles(rng: np.random.Generator, launches: int, leak: dict[str, float], wider: dict[str, float]) -> tuple[Any, Any]:
    labels = rng.integers(len(prove.CLASSES), size=launches)
    mean = np.array([10_000 + leak.get(name, 0) for name in prove.CLASSES])[labels]
    drift = 200 * np.sin(np.arange(launches) / 5000)  # of the clock, over all classes alike
    return labels, mean + drift + rng.normal(size=launches) * np.array([60 * wider.get(name, 1) for name in prove.CLASSES])[
        labels
    ]


def test_leaks_are_found_and_only_those() -> None:
    rng = np.random.default_rng(0)
    rows, leaks = prove.verdicts(prove.leakage(*cycles(rng, 120_000, {}, {})))
    assert not leaks and [row[-1] for row in rows[1:]] == ["passed"] * 5
    rows, leaks = prove.verdicts(prove.leakage(*cycles(rng, 120_000, {"large": -15}, {"near_zero": 2})))
    assert leaks and [row[-1] for row in rows[1:]] == ["passed", "leaks", "leaks", "passed", "passed"]
    assert float(rows[2][2]) == pytest.approx(-15, abs=2)
    assert abs(float(rows[2][3])) > 4.5 > abs(float(rows[3][3])), "a wider spread is seen by the second order alone"


def test_verdict_counts_the_launches_of_a_class() -> None:
    rows, _ = prove.verdicts({"random": [(600, 1.0, 1.0, 0.5), (1200, -2.0, 5.0, -0.25)]})
    assert rows[1] == ["random", "200", "-0.25", "-2.0", "+5.0", "leaks"]


@pytest.mark.parametrize("leaking", list(itertools.product([False, True], repeat=3)), ids=str)
def test_what_the_timing_proof_demands(monkeypatch: pytest.MonkeyPatch, leaking: tuple[bool, bool, bool]) -> None:
    """constant_time must pass and the leaky one be caught; the default may do either."""
    order = [(True,), (False,), (True, "leaky")]
    monkeypatch.setattr(machine, "gpu", lambda tool: DEVICE)
    monkeypatch.setattr(prove, "leaks", lambda device, launches, folder, *kernel: leaking[order.index(kernel)])
    assert prove.main(["timing"]) == (leaking[0] or not leaking[2])


def test_t_of_a_leak_grows_with_the_root_of_launches(tmp_path: Any) -> None:
    found = prove.leakage(*cycles(np.random.default_rng(1), 400_000, {"random": 20}, {}))
    points = [abs(t) for _, t, _, _ in found["random"]]
    assert points[-1] / points[9] == pytest.approx(2, rel=0.4) and found["random"][-1][0] == 400_000
    pytest.importorskip("matplotlib")
    prove.draw(found, tmp_path / "t.svg")
    assert "</svg>" in (tmp_path / "t.svg").read_text()


@pytest.mark.parametrize("name", prove.EXPECTED)
def test_the_clock_is_written_by_choices(name: str) -> None:
    """The kernels of the timing proof differ from the product's in one option and one field, and compile."""
    kind, *patches = name.split("-")
    op = sets.operation(prove.TIMED, kind == "constant_time")
    kernel, config = prove.Timed(4096, *patches), AttnFwdConfig(128, 128, 2, 1)
    (launch,), (plain,) = (each.lower(op, config, DEVICE).launches for each in (kernel, ATTN_FWD))
    source = launch.source
    header = dict(source.headers)["config.cuh"]
    assert f"using Softmax = TimedSoftmax<{'SpeculativeMax' if name == 'default' else 'ConstantTime'}>;" in header
    assert ("__all_sync" in dict(source.headers)["tile/softmax.cuh"]) is (name == "constant_time-leaky")
    assert "using Scheduler = LptScheduler<DynamicPersistent>;" in header
    assert set(launch.fields) == {*plain.fields, Field("cycles", "i32*")} and len(launch.fields) == 1 + len(plain.fields)
    assert launch.values == {**plain.values, "cycles": 4096}
    assert launch.grid == 64, "each block has one work"
    assert compiler.compile(source).registers > 0


def test_a_step_on_every_way_through_the_loop() -> None:
    """A branch over what is rare, one over a second product, one back."""
    text = """\
.L_x_1:
        /*0000*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0010*/              @P0 BRA `(.L_x_2) ;
        /*0020*/                   FMUL R1, R1, R2 ;
        /*0030*/                   FMUL R1, R1, R2 ;
.L_x_2:
        /*0040*/              @P1 BRA `(.L_x_3) ;
        /*0050*/                   MUFU.EX2 R5, R6 ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
.L_x_3:
        /*0070*/              @P2 BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""
    ways = [sorted(collections.Counter(map(machine_code.family, way)).items()) for way in occupancy.paths(text)]
    assert len(ways) == 4
    assert [("BRA", 3), ("HMMA", 1)] in ways and [("BRA", 3), ("FMUL", 2), ("HMMA", 2), ("MUFU.EX2", 1)] in ways


def test_occupancy_and_predictions() -> None:
    device = TYPICAL["sm_89"]
    try:
        titles, *rows = occupancy.table([device], [(64, 64)])
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for row in (dict(zip(titles, row, strict=True)) for row in rows):
        assert row["spills"] == "0" and int(row["HMMA"]) >= 64 and int(row["LDSM"]) > 0 and int(row["LDGSTS"]) > 0
        assert int(row["blocks"]) >= 2 and int(row["step"]) > int(row["HMMA"]) + int(row["LDSM"]) + int(row["MUFU.EX2"])
    op = sets.operation(sets.dense(8, 4096, 16, 64, False))
    config = attn_fwd_mma.AttnFwdMmaConfig(128, 64, 2, 2, 4, 2)
    assert [occupancy.blocks(config, op, device, registers) for registers in (255, 168, 128, 64)] == [2, 3, 3, 3]
    predicted = occupancy.predictions(device)[1:]
    assert len(predicted) == 26 and all(float(row[4]) >= float(row[2]) for row in predicted)


def test_no_tool_needs_the_gpu_to_be_imported() -> None:
    folder = machine.ROOT / "perf"
    paths = [*folder.rglob("*.py")]
    names = [".".join(path.relative_to(machine.ROOT).with_suffix("").parts) for path in paths]
    assert "perf.bench" in names and "perf.lib.sets" in names
    code = f"import sys\nfor name in {names}: __import__(name)\nprint(*{{'torch', 'matplotlib'}} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=machine.ROOT, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == []


def test_cases_by_name() -> None:
    assert sets.pick("paper/21") == sets.SETS["paper"][21] and sets.pick("smoke") == sets.SETS["smoke"][0]
    assert sets.pick(json.dumps(sets.to_json(CASE))) == CASE
    for wrong in ("none/1", "paper/36", "paper/-1"):
        with pytest.raises(SystemExit, match=r"is no case; give a set and a number in it, of .*paper \(36\)"):
            sets.pick(wrong)
    assert report.table([["x"]]) == "x"


def test_no_command_imports_another() -> None:
    """The code that commands share is in perf/lib, which imports no command."""
    folder = machine.ROOT / "perf"
    commands = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert {"bench", "gate"} < commands
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                outside = node.level == (1 if path.parent == folder else 2) or node.module == "perf"
                names = {alias.name for alias in node.names} if node.module in (None, "perf") else {node.module.split(".")[0]}
                found += [f"{path.name}: {name}" for name in names & commands if outside]
    assert not found
