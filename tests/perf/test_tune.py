"""perf.lib.search on a surface with a known optimum, and perf.tune and its records without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import random
import time
from typing import Any

import pytest

from perf import tune
from perf.lib import compiling, machine, sets
from perf.lib.search import Search, genes
from perf.lib.statistics import Ratio
from rawattn.command import timing
from rawattn.compile import compiler
from rawattn.driver.device import TYPICAL
from rawattn.kernel import records
from rawattn.kernel.attn_fwd import ATTN_FWD, AttnFwdConfig
from rawattn.kernel.records import Kind
from rawattn.runtime import select
from rawattn.testing import Case

DEVICE = TYPICAL["sm_90a"]
OPTIMUM = AttnFwdConfig(64, 208, 3, 2)


def surface(config: AttnFwdConfig) -> float:
    """Least at OPTIMUM, with a ridge: the best tile_kv depends on tile_q."""
    tile_q, tile_kv = config.tile_q / 64, config.tile_kv / 16
    return 10 + (tile_q + tile_kv / 4 - 4.25) ** 2 + 0.3 * (tile_q - 1) ** 2 + abs(config.stages - 3) + (config.q_stages == 1)


def legal(config: AttnFwdConfig) -> bool:
    bounds = (64, 192, config.tile_q), (32, 256, config.tile_kv), (2, 4, config.stages), (1, 2, config.q_stages)
    return all(low <= value <= high for low, high, value in bounds)


def seeds() -> list[AttnFwdConfig]:
    return [AttnFwdConfig(tile_q, tile_kv, 2, 1) for tile_q in (128, 192) for tile_kv in (64, 96, 128)]


def evaluations(seed: int) -> int:
    """Returns how many configurations a search tries until it finds the optimum."""
    candidates = [AttnFwdConfig(q, kv, s, p) for q in (128, 192) for kv in range(32, 257, 16) for s in (2, 3) for p in (1, 2)]
    search = Search(seeds(), genes(candidates), legal, seed)
    while OPTIMUM not in search.costs:
        for config in search.ask(6):
            search.tell(config, surface(config))
    assert search.ranking()[0] == (OPTIMUM, 10)
    return len(search.costs)


def test_search_finds_the_optimum() -> None:
    """Far sooner than by chance, which takes 135 of the 270 legal configurations in the mean."""
    found = [evaluations(seed) for seed in range(12)]
    assert sorted(found)[6] < 90 and max(found) < 135


def test_search_tries_seeds_first_and_nothing_twice() -> None:
    search, asked = Search(seeds(), genes(seeds()), legal, 0), []
    assert search.ask(6) == seeds()
    while found := search.ask(5):
        asked += found
        for config in found:
            search.tell(config, math.inf)
    assert len(set(asked + seeds())) == len(asked) + 6 and all(map(legal, asked))
    assert search.ranking() == []


def test_the_same_seed_is_the_same_search() -> None:
    def run(seed: int) -> list[AttnFwdConfig]:
        search, asked = Search(seeds(), genes(seeds()), legal, seed), []
        for _ in range(5):
            asked += (found := search.ask(6))
            for config in found:
                search.tell(config, surface(config))
        return asked

    assert run(1) == run(1) != run(2)


def test_genes_reach_beyond_the_candidates() -> None:
    found = genes(ATTN_FWD.candidates(sets.SETS["paper"][12].op, DEVICE))
    fixed = {"pack_gqa", "kv_splits", "ctas_per_sm"}
    assert set(found) == {field.name for field in dataclasses.fields(AttnFwdConfig)} - fixed
    assert {64, 128, 192} <= set(found["tile_q"]) and {2, 3} <= set(found["stages"])


@pytest.mark.parametrize(
    ("ratios", "wins"),
    [
        ([Ratio(1.02, 1.01, 1.03)], True),
        ([Ratio(1.005, 1.004, 1.006)], False),
        ([Ratio(1.05, 0.99, 1.1)], False),
        ([Ratio(0.9, 0.8, 1.0)], False),
        ([Ratio(1.05, 1.04, 1.06), Ratio(0.985, 0.98, 0.99)], True),
        ([Ratio(1.05, 1.04, 1.06), Ratio(0.975, 0.97, 0.98)], False),
        ([Ratio(1.03, 1.02, 1.04), Ratio(0.985, 0.98, 0.99)], False),
    ],
)
def test_winner(ratios: list[Ratio], wins: bool) -> None:
    """1 % ahead in the mean, ahead of the noise, and nowhere more than 2 % behind."""
    assert tune.beats(ratios) is wins


class Compiled(compiling.Pool):
    """Compiles nothing; tile_kv 96 spills."""

    def __init__(self) -> None:
        self.sources: list[Any] = []

    def __exit__(self, *_: object) -> None: ...
    def drop(self) -> None:
        self.sources.clear()

    def submit(self, sources: Any) -> int:
        self.sources += sources
        return 0

    def results(self) -> Any:
        while self.sources:
            source = self.sources.pop()
            spills = "8 bytes spill stores" if "tile_kv = 96;" in dict(source.headers)["config.cuh"] else ""
            yield source.key, compiler.Binary(b"", spills, "13", 0.0, "compiled", source.key)


class Race(tune.Race):
    """Times that follow a surface, with 0.3 % of noise."""

    def __init__(self, tuner: tune.Tuner, optimum: AttnFwdConfig) -> None:
        self.tuner, self.loads, self.optimum, self.random = tuner, {}, optimum, random.Random(0)
        self.tasks, self.checks = [None] * len(tuner.ops), [None] * len(tuner.ops)  # type: ignore[list-item]

    def us(self, config: AttnFwdConfig, case: int) -> float:
        sizes = (dataclasses.astuple(each)[:4] for each in (config, self.optimum))  # the others are fixed
        far = sum(abs(math.log2(a / b)) for a, b in zip(*sizes, strict=True))
        return 100 * (1 + case) * (1 + 0.05 * far)

    def load(self, config: AttnFwdConfig, task: Any, check: Any) -> Any:
        return timing.Load(lambda: None, contextlib.nullcontext, self.us(config, 0), 1.0)

    def times(self, configs: Any, rounds: int, seed: int = 0) -> Any:
        def measure(us: float) -> list[list[float]]:
            return [[us * self.random.gauss(1, 0.003) for _ in range(20)] for _ in range(rounds)]

        return [{c: measure(self.us(c, case)) for c in configs} for case in range(len(self.tasks))]


CASES = [sets.dense(16384 // length, length, 32, 64, True) for length in (2048, 4096)]


def tuner_of(cases: list[Case]) -> tune.Tuner:
    (group,) = tune.groups(cases, DEVICE)
    return tune.Tuner(group, DEVICE)


def test_evolution_finds_a_better_configuration() -> None:
    optimum = AttnFwdConfig(128, 160, 3, 1)
    tuner = tuner_of(CASES)
    assert ATTN_FWD.legal(optimum, tuner.ops[0], DEVICE) is None and tuner.first != optimum
    race = Race(tuner, optimum)
    tune.evolve(tuner, race, Compiled(), seconds=3)
    assert race.us(tuner.best, 0) <= 100 * 1.03
    assert tuner.ratio.value == pytest.approx(race.us(tuner.first, 0) / race.us(tuner.best, 0), rel=0.01)
    assert all(("x96" in name) == (each == "8 bytes spilled") for name, each in tuner.tried.items())
    record = json.loads(json.dumps(tuner.record({"sm_mhz": 1700.0}, {"nvrtc": "13.5"})))
    assert AttnFwdConfig(**record["config"]) == tuner.best and Kind(**record["kind"]) == tuner.group.kind
    assert {"kernel", "us", "ratio", "interval", "worst", "cases", "clocks", "nvrtc", "code_hash", "commit", "date"} <= set(
        record
    )
    assert record["cases"] == [sets.label(case) for case in CASES]


def test_what_looks_hopeless_is_not_raced() -> None:
    tuner = tuner_of(CASES)
    race = Race(tuner, tuner.first)
    assert race.ready(tuner.first) and race.ready(dataclasses.replace(tuner.first, stages=6))
    slow = dataclasses.replace(tuner.first, tile_q=64, stages=2)
    assert not race.ready(slow) and slow not in race.loads
    assert tuner.search.costs[slow] == pytest.approx(race.us(slow, 0)), "its cost is known all the same"


def test_noise_makes_no_winner() -> None:
    tuner = tuner_of(CASES)
    race = Race(tuner, tuner.first)
    race.us = lambda config, case: 100.0  # type: ignore[method-assign]
    tune.evolve(tuner, race, Compiled(), seconds=1)
    assert tuner.best == tuner.first and tuner.ratio.low <= 1 <= tuner.ratio.high


def test_dry_run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "Pool", Compiled)
    records_file = tmp_path / "records.jsonl"
    words = ["--set", "smoke", "--dry", "--budget", "20", "--out", str(tmp_path), "--records", str(records_file)]
    assert tune.main(words) == 0
    assert "geometric mean" in capsys.readouterr().out
    tried = json.loads((tmp_path / "tune.json").read_text())["tried"]
    assert len(tried) == len(tune.groups(sets.SETS["smoke"], DEVICE)) and all(len(each["us"]) == 20 for each in tried.values())
    assert not records_file.exists()


def test_a_dry_run_writes_nothing_unless_asked(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder would be that of what was measured on the device it stands for."""
    monkeypatch.setattr(tune, "Pool", Compiled)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert tune.main(["--set", "smoke", "--dry", "--budget", "2"]) == 0
    assert not [*tmp_path.iterdir()]


def test_real_compilation_in_processes() -> None:
    op = sets.operation(sets.dense(1, 512, 8, 64, False))
    source = ATTN_FWD.render(op, AttnFwdConfig(128, 64, 2, 1), DEVICE.arch)
    broken = dataclasses.replace(source, text="#error no\n")
    with compiling.Pool(2) as pool:
        assert pool.submit([source, source, broken]) == 2
        found = dict(pool.results())
    assert compiling.faults(found[source.key]) == "" and found[source.key].registers > 0
    assert "no" in str(found[broken.key]) and isinstance(found[broken.key], compiler.CompileError)


def made_record(kind: Kind, config: AttnFwdConfig, **more: Any) -> dict[str, Any]:
    found = {"kernel": kind.kernel, "kind": dataclasses.asdict(kind), "config": dataclasses.asdict(config)}
    return {**found, "code_hash": "", "date": "2026-11-21T03:00:00+00:00", **more}


def test_records(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "folder" / "h200.jsonl"
    assert records.read(path) == {}
    kinds = [group.kind for group in tune.groups(sets.SETS["paper"], DEVICE)][:3]
    for i, kind in enumerate([*kinds, kinds[1]]):
        tune.add(path, made_record(kind, AttnFwdConfig(stages=i)))
    assert [records.read(path)[kind]["config"]["stages"] for kind in kinds] == [0, 3, 2]


def test_groups_follow_the_choice() -> None:
    """Every case is tuned with those that the library gives the same member of a config_set, whatever their length."""
    paper = tune.groups(sets.SETS["paper"], DEVICE)
    assert [len(group.cases) for group in paper] == [6] * 6 and len({group.kind for group in paper}) == 6
    for name in sets.SETS:
        found = tune.groups(sets.SETS[name], DEVICE)
        assert sum(len(group.cases) for group in found) == sum(sets.is_tuned(case) for case in sets.SETS[name])
        for group in found:
            configs = {select.select(sets.operation(case), DEVICE).config for case in group.cases}
            assert configs == {group.member.config}
    assert {group.kernel.name for group in tune.groups(sets.SETS["paper"], DEVICE, "attn_fwd_mma")} == {"attn_fwd_mma"}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """Puts records into the place of the installed ones."""

    def forget() -> None:
        records._read_installed.cache_clear()
        select.forget()

    def put(*lines: dict[str, Any]) -> None:
        for line in lines:
            tune.add(tmp_path / "h200.jsonl", line)
        forget()

    monkeypatch.setattr(records, "FOLDER", tmp_path)
    forget()
    yield put
    forget()


OTHER = AttnFwdConfig(128, 96, 2, 2)  # legal at head_dim 128, and not what the cost model takes


def test_a_record_is_chosen(recorded: Any) -> None:
    """For all lengths of its kind, with and without lse, constant time and packing, and for no other kind."""
    long, short = (sets.dense(batch, length, heads, 128, True).op for batch, length, heads in ((4, 4096, 16), (1, 512, 8)))
    before = {op: select.select(op, DEVICE) for op in (long, short)}
    (group,) = tune.groups([sets.dense(4, 4096, 16, 128, True)], DEVICE)
    current = records.code_hash(ATTN_FWD, group.member.shape, OTHER, DEVICE)
    assert before[long].config != OTHER != before[short].config and "by the cost model" in before[long].why
    recorded(made_record(group.kind, OTHER, code_hash=current))
    found = select.select(long, DEVICE)
    assert found.config == OTHER and found.why == f"record of 2026-11-21 for operations like {group.kind.size}"
    assert before[short].config in found.compiled_with and OTHER not in found.compiled_with
    others = [dataclasses.replace(long, **change) for change in ({"q_len": 9000, "kv_len": 9000}, {"kv_heads": 4})]
    for changed in ({"return_lse": False}, {"scale": -1.0}, {"constant_time": True}):
        others.append(dataclasses.replace(long, spec=dataclasses.replace(long.spec, **changed)))
    for op in (*others, sets.packed(8, 128).op):
        assert op != long and select.select(op, DEVICE).config == OTHER
    after = select.select(short, DEVICE)
    assert after.config == before[short].config and after.why == before[short].why and OTHER in after.compiled_with
    assert "by the cost model" in select.select(dataclasses.replace(long, head_dim=120), DEVICE).why
    assert "by the cost model" in select.select(long, dataclasses.replace(DEVICE, name="NVIDIA H100")).why


@pytest.mark.parametrize(
    "change",
    [{"code_hash": "0" * 16}, {"config": {"tile_q": 128}}, {"config": dataclasses.asdict(AttnFwdConfig(192, 256, 2, 2))}],
    ids=["other sources", "other fields", "illegal"],
)
def test_a_stale_record_is_ignored(recorded: Any, change: dict[str, Any]) -> None:
    op = sets.dense(4, 4096, 16, 128, True).op
    before = select.select(op, DEVICE)
    (group,) = tune.groups([sets.dense(4, 4096, 16, 128, True)], DEVICE)
    current = records.code_hash(ATTN_FWD, group.member.shape, OTHER, DEVICE)
    recorded({**made_record(group.kind, OTHER, code_hash=current), **change})
    assert select.select(op, DEVICE) == before


def test_what_has_a_record_is_not_searched_again(recorded: Any, tmp_path: pathlib.Path) -> None:
    options = argparse.Namespace(set="paper", cases=None, kernel=None, again=False, dry=False)
    todo = [*tune.pending(options, DEVICE, {})]
    lines = [
        made_record(g.kind, g.member.config, code_hash=records.code_hash(g.kernel, g.member.shape, g.member.config, DEVICE))
        for g in todo
    ]
    lines[2]["code_hash"] = "stale"
    known = {Kind(**line["kind"]): line for line in lines}
    assert [group.kind for group in tune.pending(options, DEVICE, known)] == [todo[2].kind]
    assert len([*tune.pending(argparse.Namespace(**{**vars(options), "again": True}), DEVICE, known)]) == 6
    assert tune.recorded(todo[2], known) == todo[2].member.config, "a stale one is still worth a try"
    assert tune.recorded(todo[2], {}) is None


def test_records_are_read_once_and_fast(recorded: Any) -> None:
    """Thirty kinds take less than a millisecond, the best of some tries."""
    kinds = [dataclasses.replace(tune.groups(CASES, DEVICE)[0].kind, head_dim=8 * i) for i in range(30)]
    recorded(*(made_record(kind, OTHER, cases=["4x4096 h16 d128 causal"] * 6) for kind in kinds))
    seconds = []
    for _ in range(10):
        records._read_installed.cache_clear()
        begin = time.perf_counter()
        assert len(records._read_installed("h200")) == 30
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 1e-3
    assert records._read_installed("h200") is records._read_installed("h200")
