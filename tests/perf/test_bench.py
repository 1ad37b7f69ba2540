"""perf.bench and what it stands on, without a GPU: cases on the CPU path against torch's, by a clock that is told the times."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import math
import pathlib
import sys
import time
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from perf import bench, plot
from perf.lib import benchmark, machine, ours, peers, report, sets
from perf.lib.benchmark import Settings
from perf.lib.checking import Check, failure
from perf.lib.task import Task, Unserved
from rawattn import reference
from rawattn.command import timing
from rawattn.command.timing import Call, Load
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.errors import CompileError
from rawattn.kernel import attn_fwd, attn_fwd_mma
from rawattn.kernel.attn_fwd import ATTN_FWD
from rawattn.kernel.attn_fwd_mma import ATTN_FWD_MMA
from rawattn.kernel.attn_fwd_simt import ATTN_FWD_SIMT
from rawattn.testing import Case
from rawattn.variant import Option
from rawattn.variant.mask import Full

torch = pytest.importorskip("torch")


class Clock(timing.Gpu):
    """Says that our call takes 100 us and every peer's 110, 120, ...; runs each call once."""

    def __init__(self) -> None:
        self.torch = torch
        self.us: Iterator[float] = iter(range(100, 1000, 10))
        self.order: list[float] = []

    def load(self, call: Call) -> Load:
        return Load(call.run, call.context, next(self.us), 10.0)

    def graph(self, call: Call, launches: int = 20) -> Load:
        raise RuntimeError("no graphs here\nat all")

    def burst(self, load: Load, seconds: float, rest: float = 0.0) -> list[float]:
        self.order.append(load.us)
        return [load.us] * 3

    def host_us(self, run: Any, us: float) -> float:
        return 7.0

    def peak_bytes(self, run: Any) -> int:
        return 1 << 20


@pytest.fixture
def run_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    def run(case: Case, names: list[str], found: dict[str, peers.Adapter], **options: Any) -> report.Result:
        make = Task.make.__func__
        monkeypatch.setattr(Task, "make", classmethod(lambda cls, case, seed: make(cls, case, seed, "cpu")))
        monkeypatch.setattr(timing, "Gpu", Clock)
        monkeypatch.setattr(ours, "config_name", str)
        return benchmark.Benchmark(Settings(**options), found).case(case, names)

    return run


def wrong(task: Task) -> Call:
    return Call(lambda: task.q * 2)


def hole(task: Task) -> Call:
    """Right on the sampled rows, but with one element that was never written."""
    good = ours.ours(task, "ours").run()
    good[0, 77, 0, 3] = float("nan")
    return Call(lambda: good)


def broken(task: Task) -> Call:
    raise RuntimeError("an error\nwith details")


@pytest.mark.parametrize("case", [sets.dense(2, 200, 4, 64, True, kv_heads=2), sets.dense(1, 130, 2, 64, False)], ids=sets.label)
def test_bench_on_the_cpu(run_bench: Any, case: Case) -> None:
    rivals = {"math": peers.PEERS["math"][1], "wrong": wrong, "hole": hole, "broken": broken}
    result = run_bench(case, ["ours", *rivals], rivals)
    by_name = {t.name: t for t in result.timings}
    assert by_name["ours"].us == 100 and by_name["math"].us == 110
    assert result.ratio() == result.ratio("math") == pytest.approx(1.1)
    assert by_name["ours"].error < 5e-3 and by_name["math"].error < 5e-3
    assert by_name["wrong"].failure.startswith("relative error") and by_name["hole"].failure == "relative error nan"
    assert by_name["broken"].failure == "RuntimeError: an error"
    assert by_name["math"].note == "cannot be captured: RuntimeError: no graphs here"
    assert by_name["ours"].tflops == pytest.approx(sets.flops(case) / 100e-6 / 1e12)
    assert (by_name["ours"].host_us, by_name["ours"].plan_us, by_name["ours"].peak_mb) == (7.0, 7.0, 1.0)


def test_packed_sequences(run_bench: Any) -> None:
    case = dataclasses.replace(sets.packed(5, 64, tokens=300), heads=2, kv_heads=2)
    result = run_bench(case, ["ours", "math"], peers.installed())
    assert result.timings[0].error < 5e-3 and not result.timings[0].failure
    assert result.timings[1].failure == "no lengths"


def test_rounds_are_interleaved_and_shuffled() -> None:
    clock = Clock()
    loads = {name: clock.load(Call(lambda: None)) for name in "abcd"}
    times = timing.race(clock, loads, timing.BURST)
    rounds = [clock.order[i : i + 4] for i in range(0, 20, 4)]
    assert all(sorted(each) == [100, 110, 120, 130] for each in rounds) and len(set(map(tuple, rounds))) > 1
    assert times["b"] == [[110.0] * 3] * 5


def made_run() -> report.Run:
    results = []
    for case, mine, theirs in zip(sets.SETS["paper"][:4], (100.0, 50.0, 200.0, 80.0), (110.0, 60.0, 190.0, 100.0), strict=True):
        result = report.Result(sets.label(case), sets.to_json(case), sets.flops(case), 1000, "events")
        for name, us in (("ours", mine), ("fa3", theirs), ("cudnn", 2 * theirs)):
            result.timings.append(report.Timing(name))
            result.timings[-1].take([[us, us * 1.01, us * 0.99]] * 5, result.flops, result.bytes)
        result.timings.append(report.Timing("fa2", failure="out of memory"))
        result.compare()
        results.append(result)
    return report.Run({"device": "NVIDIA H200"}, {"set": "paper"}, {"matmul_tflops": 800.0, "copy_gbs": 4000.0}, results)


def test_report(tmp_path: pathlib.Path) -> None:
    run = made_run()
    run.write(tmp_path, "bench")
    again = report.Run.read(tmp_path / "bench.json")
    assert again.rows() == run.rows() and again.summary() == run.summary() and again.peers == ["fa3", "cudnn"]
    total = run.summary()[-1]
    mean = (1.1 * 1.2 * 0.95 * 1.25) ** 0.25
    assert total[:5] == ["all", "all", "4", f"{mean:.3f}", "0.950"] and total[6] == f"{2 * mean:.3f}"
    text = (tmp_path / "bench.md").read_text()
    assert "| 32x512 h32 d64 full" in text and "NVIDIA H200" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
    assert not json.loads((tmp_path / "bench.json").read_text())["results"][0]["timings"][0].get("rounds")
    assert len(run.failures()) == 4


def test_plot(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    made_run().write(tmp_path, "bench")
    assert plot.main([str(tmp_path / "bench.json"), "--out", str(tmp_path / "figures")]) == 0
    pictures = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in pictures] == ["bench-bars.svg", "bench-roofline.svg"]
    assert capsys.readouterr().out.split() == [str(path) for path in pictures]
    report.Run({}, {}).write(tmp_path, "empty")
    with pytest.raises(SystemExit, match="no timings"):
        plot.main([str(tmp_path / "empty.json")])


def test_table() -> None:
    assert report.table([["a", "bb"], ["ccc", 1]]) == "a    bb\nccc   1"
    assert report.table([["a", "bb"], ["ccc", 1]], markdown=True) == "| a   | bb |\n| --- | -: |\n| ccc |  1 |"
    words = report.table(
        [["xx", "number", "config", "what"], ["y", math.nan, "64x8s2", "Some words."]], markdown=True
    ).splitlines()
    assert words[1:] == ["| -- | -----: | -----: | ----------- |", "| y  |      - | 64x8s2 | Some words. |"]


def test_sets() -> None:
    assert len(sets.SETS["paper"]) == 36 == len(set(sets.SETS["paper"]))
    for name in sets.SETS:
        cases = sets.load(name, None)
        assert cases and len({sets.label(case) for case in cases}) == len(cases)
        assert [sets.from_json(json.loads(json.dumps(sets.to_json(case)))) for case in cases] == cases
    steps = [case for cases in sets.SETS.values() for case in cases if isinstance(case, sets.StepCase)]
    assert all(0 < case.bytes <= case.pool_bytes for case in steps)  # more cannot be read
    assert all(sum(q for q, _ in case.lengths or ()) == 16384 for case in sets.SETS["varlen"])
    assert len({length for length, _ in sets.packed(64, 128).lengths or ()}) > 30


def test_flops_and_labels() -> None:
    assert sets.flops(sets.dense(3, 1000, 5, 64, False)) == 4 * 3 * 5 * 1000 * 1000 * 64
    assert sets.flops(sets.dense(1, 1000, 1, 64, True)) == 4 * 64 * 1000 * 1001 // 2
    assert sets.flops(Case(head_dim=32, head_dim_v=64, lengths=((3, 4), (5, 6)))) == 2 * 96 * (12 + 30)
    assert (
        sets.label(sets.dense(4, 4096, 32, 128, True, kv_heads=8, window=(1024, 0), dtype="fp16"))
        == "4x4096 h32/8 d128 causal+window1024,0 fp16"
    )


def test_cases_of_a_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "mine.json").write_text('[{"q_len": 7, "kv_len": 9, "window": [3, null]}, {"lengths": [[1, 2], [3, 4]]}]')
    assert sets.load("", str(tmp_path / "mine.json")) == [
        Case(q_len=7, kv_len=9, window=(3, None)),
        Case(lengths=((1, 2), (3, 4))),
    ]


def test_config_names() -> None:
    device, op = TYPICAL["sm_90a"], sets.SETS["paper"][12].op
    for kernel in (ATTN_FWD, ATTN_FWD_MMA, ATTN_FWD_SIMT):
        for config in kernel.candidates(op, device):
            assert ours.parse_config(kernel.config_type, ours.config_name(config)) == config
    assert ours.config_name(attn_fwd_mma.AttnFwdMmaConfig(64, 32, 3, 1, 4, 2)) == "64x32st3m1q4c2p0sp0"
    assert ours.parse_config(attn_fwd.AttnFwdConfig, "192x96") == attn_fwd.AttnFwdConfig(192, 96)
    with pytest.raises(ValueError, match="no configuration"):
        ours.parse_config(attn_fwd.AttnFwdConfig, "fast")
    options = ours.our_options(Case(causal=True), "ours:attn_fwd/128x96s2q2")
    assert options == {"causal": True, "kernel": "attn_fwd", "config": attn_fwd.AttnFwdConfig(128, 96, 2, 2)}
    assert ours.our_options(Case(), "ours", "attn_fwd_mma") == {"kernel": "attn_fwd_mma"}
    assert ours.our_options(Case(), "ours:64x32", "attn_fwd_mma")["config"] == attn_fwd_mma.AttnFwdMmaConfig(64, 32)
    assert ours.our_options(Case(), "ours:attn_fwd/64x32", "attn_fwd_mma")["kernel"] == "attn_fwd"
    assert ours.our_options(Case(), "ours") == {}
    names = ours.our_names(sets.SETS["paper"][12], "all", device)
    assert names[0] == "ours" and len(names) > 10
    assert len(list(ours.sources({sets.SETS["paper"][12]: [*names, "ours:64x256"]}, device))) == len(names), (
        "what cannot run is left away"
    )


@pytest.mark.parametrize("tool", ["ablate", "bench", "gate", "host", "map", "memory", "prove", "train"])
def test_without_a_gpu(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.context, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=f"perf.{tool}: no NVIDIA GPU here"):
        importlib.import_module(f"perf.{tool}").main([])


COMMANDS = sorted(path.stem for path in (machine.ROOT / "perf").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("tool", COMMANDS)
def test_help(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"perf.{tool}").main(["--help"])
    assert f"python -m perf.{tool}" in capsys.readouterr().out.split("\n\n", 1)[1], "an example stands in the text"


def test_an_interruption_keeps_what_was_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    made = made_run()

    class Interrupted(benchmark.Benchmark):
        def __init__(self, *_: Any) -> None: ...
        def ceilings(self) -> dict[str, float]:
            return made.ceilings

        def case(self, case: Case, names: Any, label: str = "") -> report.Result:
            if not made.results:
                raise KeyboardInterrupt
            return made.results.pop(0)

    monkeypatch.setattr(benchmark, "Benchmark", Interrupted)
    monkeypatch.setattr(benchmark, "sources", lambda *_: ())
    monkeypatch.setattr(machine.context, "device_count", lambda: 1)
    monkeypatch.setattr(machine.context, "device", lambda index: TYPICAL["sm_90a"])
    assert bench.main(["--set", "paper", "--out", str(tmp_path), "--peers", ""]) == 130
    assert len(report.Run.read(tmp_path / "bench-paper-burst.json").results) == 4


def test_machine() -> None:
    names = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100-80gb-hbm3", TYPICAL["sm_90a"].name: "h200"}
    assert {name: dataclasses.replace(TYPICAL["sm_90a"], name=name).slug for name in names} == names
    assert machine.source_hash() == machine.source_hash() and len(machine.source_hash()) == 16
    assert {"date", "source_hash", "python"} <= set(machine.facts())
    monitor = machine.Monitor()
    assert monitor.summary(0) == {}
    monitor.readings += [
        (at, clock, power, 60.0) for at, clock, power in ((0, 345, 90), (1, 1980, 500), (2, 1700, 690), (3, 1720, 700))
    ]
    assert monitor.summary(1) == {"sm_mhz": 1720, "power_w": 700, "celsius": 60}


def test_monitor_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_reader", lambda: (lambda: (1.0, 2.0, 3.0), 0.001))
    begin = time.monotonic()
    with machine.Monitor() as monitor:
        while not monitor.summary(begin):
            time.sleep(0.001)
    assert monitor.summary(begin) == {"sm_mhz": 1, "power_w": 2, "celsius": 3}


def test_arguments_of_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    operator = types.SimpleNamespace(fwd=lambda q, k, v, **options: (seen.update(options), (q,))[1])
    monkeypatch.setattr(torch.ops, "flash_attn_3", operator, raising=False)
    task = Task.make(sets.dense(1, 64, 4, 64, True, window=(16, 0)), device="cpu")
    assert peers.fa3(task).run() is task.q
    assert seen == {"window_size_left": 16, "window_size_right": 0, "softmax_scale": 0.125, "is_causal": True, "num_splits": 1}
    task = Task.make(sets.packed(3, 64, tokens=100), device="cpu")
    peers.fa3(task).run()
    lengths = [n for n, _ in task.case.lengths or ()]
    assert seen["cu_seqlens_q"].tolist() == [0, lengths[0], sum(lengths[:2]), 100] and seen["cu_seqlens_k"].dtype == torch.int32
    assert seen["max_seqlen_q"] == seen["max_seqlen_k"] == max(lengths) and seen["is_causal"] is True
    with pytest.raises(Unserved, match="no softcap"):
        peers.fa3(Task.make(sets.dense(1, 8, 1, 64, True, softcap=30.0), device="cpu"))


def test_failure_names_no_folder() -> None:
    plain = ATTN_FWD.render(sets.dense(1, 8, 1, 64, True).op, attn_fwd.AttnFwdConfig(), "sm_90a")
    source = dataclasses.replace(plain, text="#error no\n")
    with pytest.raises(CompileError) as caught:
        compiler.compile(source)
    assert str(caught.value.source) in str(caught.value)
    text = failure(caught.value)
    assert text.startswith("CompileError: attn_fwd.cu for sm_90a: ") and "no" in text and "failed/" not in text


def test_peers_that_are_not_here() -> None:
    assert list(peers.installed(names="math,cudnn")) == ["math", "cudnn"] and peers.installed(names="") == {}
    with pytest.raises(SystemExit, match="no nobody here; there are"):
        peers.installed(names="math,nobody")


def test_windows_as_flash_attn_writes_them() -> None:
    assert peers.window_of(Case(window=(5, None))) == (5, -1) and peers.window_of(Case()) == (-1, -1)
    assert math.isnan(report.Timing("ours").us)


# ---- peers: fake libraries, with the signatures that the real ones document, that compute by our reference -------------------

ROWS = sets.dense(2, 24, 4, 16, False, kv_heads=2)
LENGTHS = dataclasses.replace(sets.packed(3, 64, tokens=60), heads=2, kv_heads=2, head_dim=16, head_dim_v=16)


class Fake:
    """Remembers what it is called with, and computes it."""

    def __init__(self, window_of: Any = lambda window: window) -> None:
        self.window_of, self.seen = window_of, dict[str, Any]()

    def compute(self, q: Any, k: Any, v: Any, window: Any, **options: Any) -> Any:
        sides = tuple(None if side in (-1, None) else side for side in window)
        arrays = [x.float().numpy() for x in (q, k, v)]
        kept = sides if any(side is not None for side in sides) else None
        o = reference.attention(*arrays, window=kept, **options)
        return torch.from_numpy(o).to(q.dtype)

    # flash_attn 2.8, flash_attn_interface and flash_attn.cute have these in common, by name
    def flash_attn_func(
        self, q: Any, k: Any, v: Any, *, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None),
        softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        self.seen = {"window_size": window_size, "softmax_scale": softmax_scale}
        return self.compute(q, k, v, window_size, causal=causal, scale=softmax_scale, softcap=softcap or None)

    def flash_attn_varlen_func(
        self, q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None), softcap: float = 0.0,
    ) -> Any:  # fmt: skip
        assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(cu_seqlens_k.diff().max())
        return self.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, window=window_size, causal=causal, scale=softmax_scale)

    def packed(self, q: Any, k: Any, v: Any, *cu_seqlens: Any, **options: Any) -> Any:
        assert all(cu.dtype == torch.int32 for cu in cu_seqlens)
        spans = zip(*(itertools.pairwise(cu.tolist()) for cu in cu_seqlens), strict=True)
        return torch.cat([self.compute(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0] for (a, b), (c, d) in spans])


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def error(case: Case, adapter: peers.Adapter) -> float:
    task = Task.make(case, device="cpu")
    return Check(task)(adapter(task))


@dataclasses.dataclass(frozen=True)
class Alibi(Option):
    """A score that knows batch and head."""

    type: ClassVar[str] = "Alibi"
    source: ClassVar[str] = ""

    def logit(self, xp: Any, s: Any, batch: int, head: int, q: Any, kv: Any) -> Any:
        return s + (batch + 1) / (head + 1) * (kv - q) / 9


HEADS = Case("fp32", batch=3, q_len=70, kv_len=70, heads=4, kv_heads=2, causal=True, sinks=True, score=Alibi())


@pytest.mark.parametrize("lengths", [None, ((5, 9), (40, 40), (70, 3))], ids=["dense", "packed"])
def test_what_is_checked_are_the_calls_own_heads(lengths: Any) -> None:
    """Sinks and scores that know batch and head are compared at the batch and the head that they are of."""
    case = dataclasses.replace(HEADS, lengths=lengths)
    assert error(case, lambda task: ours.ours(task, "ours")) < 4e-6
    for other in (dataclasses.replace(case, score=None), dataclasses.replace(case, sinks=False)):
        with pytest.raises(ArithmeticError, match="relative error"):
            error(case, lambda task, other=other: ours.ours(dataclasses.replace(task, case=other), "ours"))


@pytest.mark.parametrize("changed", [{"sinks": True}, {"q_offset": 1}, {"score": Alibi()}, {"mask": Full()}], ids=str)
def test_peers_refuse_what_they_are_not_given(changed: dict[str, Any]) -> None:
    task = Task.make(Case("fp32", **changed), device="cpu")
    with pytest.raises(Unserved, match=f"no {next(iter(changed))}"):
        task.refuse()


@pytest.mark.parametrize("name", ["fa3", "flash_attn", "fa4"])
@pytest.mark.parametrize("returns", [lambda o: o, lambda o: (o, None)], ids=["o", "o and lse"])
def test_flash_packages(monkeypatch: pytest.MonkeyPatch, name: str, returns: Any) -> None:
    """Windows are written -1 for unbounded, or None in FlashAttention 4; versions differ in whether lse comes along."""
    fake, module = Fake(), {"fa3": "flash_attn_interface", "flash_attn": "flash_attn", "fa4": "flash_attn.cute"}[name]
    functions = {each: getattr(fake, each) for each in ("flash_attn_func", "flash_attn_varlen_func")}
    if name == "fa4":
        install(monkeypatch, "flash_attn")
    install(monkeypatch, module, **{k: lambda *a, f=f, **b: returns(f(*a, **b)) for k, f in functions.items()})
    adapter = peers.PEERS[name][1]
    for case in (ROWS, dataclasses.replace(ROWS, causal=True, scale=0.3), dataclasses.replace(ROWS, causal=True, softcap=2.0)):
        assert error(case, adapter) < 5e-3
    assert fake.seen["window_size"] == (None, None), "not said where there is none"
    assert error(dataclasses.replace(ROWS, window=(5, None)), adapter) < 5e-3
    assert fake.seen["window_size"] == ((5, None) if name == "fa4" else (5, -1))
    assert error(LENGTHS, adapter) < 5e-3


def test_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()

    class Wrapper:
        def __init__(self, float_workspace_buffer: Any, kv_layout: str = "NHD") -> None:
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

        def plan(
            self, qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, head_dim_vo: int, *,
            causal: bool, window_left: int, logits_soft_cap: Any, sm_scale: Any, q_data_type: Any,
        ) -> None:  # fmt: skip
            assert (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo) == self.expected and q_data_type == torch.bfloat16
            self.cu, self.options = (qo_indptr, kv_indptr), {"causal": causal, "scale": sm_scale}
            self.options |= {"softcap": logits_soft_cap, "window": (window_left, -1)}

        def run(self, q: Any, k: Any, v: Any) -> Any:
            return fake.packed(q, k, v, *self.cu, **self.options)

        expected = (4, 2, 16, 16)

    install(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    adapter = peers.PEERS["flashinfer"][1]
    capped = dataclasses.replace(ROWS, causal=True, softcap=2.0)
    for case in (ROWS, dataclasses.replace(ROWS, causal=True, window=(5, 0)), capped):
        assert error(case, adapter) < 5e-3
    Wrapper.expected = (2, 2, 16, 16)
    assert error(LENGTHS, adapter) < 5e-3
    with pytest.raises(Unserved, match="causal only"):
        error(dataclasses.replace(ROWS, window=(5, None)), adapter)


def test_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own, on the CPU, without its compiler."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda each: each))
    adapter = peers.PEERS["flex"][1]
    for case in (ROWS, dataclasses.replace(ROWS, causal=True), dataclasses.replace(ROWS, causal=True, kv_len=40, scale=0.3)):
        assert error(case, adapter) < 5e-3


def test_packed_sequences_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operator's own schema: its arguments in their order, and no other names."""
    operator, fake = torch.ops.aten._flash_attention_forward, Fake()
    names = [argument.name for argument in operator.default._schema.arguments]

    def forward(*given: Any, **more: Any) -> Any:
        asked = dict(zip(names, given, strict=False)) | more
        assert set(asked) <= set(names) and asked["dropout_p"] == 0.0 and not asked["return_debug_mask"]
        cu = {"cu_seqlens_q": asked["cum_seq_q"], "cu_seqlens_k": asked["cum_seq_k"]}
        longest = {"max_seqlen_q": asked["max_q"], "max_seqlen_k": asked["max_k"]}
        return (fake.flash_attn_varlen_func(*given[:3], **cu, **longest, causal=asked["is_causal"]), None)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    assert error(LENGTHS, peers.PEERS["fa2"][1]) < 5e-3
    with pytest.raises(Unserved, match="no softcap"):
        error(dataclasses.replace(LENGTHS, softcap=1.0), peers.PEERS["fa2"][1])
    with pytest.raises(Unserved, match="no lengths"):
        error(LENGTHS, peers.PEERS["cudnn"][1])
