"""perf.map without a GPU: its shapes, its steps and peers on the CPU by a clock that is told the times, and its tables."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

import rawattn
from perf import map as tool
from perf.lib import backward, benchmark, checking, machine, ours, peers, sets, steps, surface
from perf.lib.surface import Spot
from perf.lib.task import Task, Unserved
from rawattn.command import timing
from rawattn.command.timing import Call, Load
from rawattn.driver.device import TYPICAL
from rawattn.kernel.attn_decode import AttnDecodeConfig
from rawattn.runtime.select import select

torch = pytest.importorskip("torch")
DEVICE = TYPICAL["sm_90a"]


def digest(spots: list[Spot]) -> str:
    words = "\n".join(f"{s.axis} @ {s.x} @ {json.dumps(sets.to_json(s.case))}" for s in spots)
    return hashlib.sha256(words.encode()).hexdigest()[:12]


# ---- shapes


def test_axes_are_those_of_the_records() -> None:
    """Names and cases stay, so that runs can be compared."""
    assert len(surface.AXES) == 445 == len({(s.axis, s.x) for s in surface.AXES}) and len({s.axis for s in surface.AXES}) == 67
    assert digest(surface.AXES) == "57d9fa752235"
    assert collections.Counter(s.axis[:3] for s in surface.AXES) == {"fwd": 183, "bwd": 157, "dec": 105}
    assert [sum(lens) for x, lens in surface.packs().items() if x[:3] == "exp"] == [30311, 35734]
    assert all(sets.from_json(json.loads(json.dumps(sets.to_json(s.case)))) == s.case for s in surface.AXES)
    assert all(sets.is_backward(s.case) == (s.axis[:3] == "bwd") for s in surface.AXES)


def test_shapes_at_random() -> None:
    """A seed has the same ones everywhere, of every kind and within bounds; another seed has others."""
    spots = surface.drawn(1)
    assert len(spots) == 225 == len({(s.axis, s.x) for s in spots}) and digest(spots) == "ec9827b2c91d"
    assert [s.case for s in surface.drawn(1, 5)] == [s.case for i in (0, 75, 150) for s in spots[i : i + 5]]
    assert not {s.case for s in surface.drawn(2, 20)} & {s.case for s in spots}
    kinds = "square", "fewer queries", "fewer keys", "drafts and chunks", "packed", "window"
    dec = "decoding", "drafts", "chunks", "window"
    wanted = {*(f"{kind} at random, {x}" for kind in ("fwd", "bwd") for x in kinds), *(f"dec at random, {x}" for x in dec)}
    assert {s.axis for s in spots} == wanted
    for case in (s.case for s in spots):
        lens = [n for pair in case.lengths or () for n in pair] or [case.q_len, case.kv_len]
        assert 1 <= case.batch <= 512 and case.kv_heads <= case.heads <= 128 and case.heads % case.kv_heads == 0
        assert 32 <= case.head_dim <= 256 and 32 <= case.head_dim_v <= 256 and min(lens) >= 1
        assert sets.flops(case) < surface.MOST_FLOPS and max(lens) <= 131072 + 511
        assert case.lengths or not case.causal or case.q_len <= case.kv_len, "a row keeps no key"
    some = [s.case for s in spots if isinstance(s.case, sets.StepCase)]
    assert len({case.page for case in some}) > 7 and any(len({*case.kv_lens}) > 1 for case in some)
    assert any(case.head_dim != case.head_dim_v for case in some) and any(case.heads // case.kv_heads > 32 for case in some)


@pytest.mark.parametrize("spots", [surface.AXES, surface.gate(), surface.drawn(3, 12)], ids=["axes", "gate", "random"])
def test_each_is_served(spots: list[Spot]) -> None:
    for spot in spots:
        selection = select(sets.operation(spot.case), DEVICE)
        assert selection.kernel.name not in ("cpu", "attn_fwd_simt", "attn_bwd_simt") and selection.slow is None, spot


def test_the_gate() -> None:
    spots = surface.gate()
    assert len(spots) == 60 == len({s.axis for s in spots}) and digest(spots) == "3ef79b899ad6" and len({s.x for s in spots}) > 25
    parts = (
        "short",
        "by heads",
        "by head_dim",
        "x keys",
        "packed",
        "tensors, by",
        "group",
        "page 16, by",
        "by keys",
        "e4m3",
        "beside",
    )
    assert all(any(part in s.axis for s in spots) for part in parts) and {s.axis[:3] for s in spots} == {"fwd", "bwd", "dec"}


# ---- steps over caches


def small(lens: tuple[int, ...], *more: int, **fields: Any) -> sets.StepCase:
    return sets.step(lens, *more, **{"heads": 4, "kv_heads": 2, "head_dim": 32, **fields})


STEPS = {
    "dense": small((70, 33)),
    "one length": small((70, 70)),
    "pages": small((70, 33), 16, 3),
    "window, unequal": small((70, 33), 16, 3, window=(9, 0), head_dim_v=16),
    "chunk": small((170, 170), 16, 90, heads=2, kv_heads=1, head_dim=16),
    "one head": small((5,), 64, heads=2, kv_heads=1, head_dim=16),
    "e4m3": small((70, 33), 16, 3, cache="e4m3"),
    "e5m2": small((70, 33), cache="e5m2"),
    "mixed": small((70, 33, 120), 16, chunks=(90,)),
}


# The arguments of flash_attn_3::fwd and ::bwd in the library that xformers 0.0.34 carries, in their order.
LENGTHS = "cu_seqlens_q cu_seqlens_k {} seqused_q seqused_k max_seqlen_q max_seqlen_k {} softmax_scale is_causal "
LENGTHS += "window_size_left window_size_right"
PAGED = "page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale"
FORWARD = f"q k v k_new v_new q_v out {LENGTHS.format('cu_seqlens_k_new', PAGED)} attention_chunk softcap".split()
FORWARD += ["is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"]
GRADIENTS = f"dout q k v out softmax_lse dq dk dv {LENGTHS.format('', '')} softcap deterministic sm_margin".split()


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """FlashAttention 3's operators by the arguments of its library, computed by ours; gives what each call was given."""
    seen = list[dict[str, Any]]()

    def given(names: list[str], *arguments: Any, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = dict(zip(names, arguments, strict=False)) | more
        assert set(found) <= {*names}, set(found) - {*names}
        assert all(
            x.dtype == torch.int32
            for name, x in found.items()
            if name in ("seqused_k", "page_table", "cu_seqlens_q", "cu_seqlens_k")
        )
        seen.append(found)
        window = tuple(
            None if side < 0 else side for side in (found.get(f"window_size_{side}", -1) for side in ("left", "right"))
        )
        return found, {"scale": found["softmax_scale"], **({"window": window} if window != (None, None) else {})}

    def fwd(*arguments: Any, **more: Any) -> Any:
        found, options = given(FORWARD, *arguments, **more)
        q, k, v = (found[name] for name in "qkv")
        if k.dtype.itemsize == 1:
            raise RuntimeError("q, k, v must have the same dtype")
        if "seqused_k" in found:
            step = rawattn.Step(
                found["seqused_k"], found.get("page_table"), found.get("cu_seqlens_q"), max_q_len=found.get("max_seqlen_q")
            )
            return rawattn.attention_kvcache(q, rawattn.KVCache(k, v, "NHD"), step, **options), None
        lens = (found["cu_seqlens_q"], found["cu_seqlens_k"]) if "cu_seqlens_q" in found else ()
        attention = rawattn.attention_varlen if lens else rawattn.attention
        return attention(q, k, v, *lens, causal=found["is_causal"], return_lse=True, **options)

    def bwd(*arguments: Any, **more: Any) -> None:
        found, options = given(GRADIENTS, *arguments, **more)
        lens = {"cu_seqlens_q": found.get("cu_seqlens_q"), "cu_seqlens_kv": found.get("cu_seqlens_k")}
        inputs, grads = ([found[name] for name in names.split()] for names in ("dout q k v out softmax_lse", "dq dk dv"))
        rawattn.attention_backward(*inputs, causal=found["is_causal"], **lens, **options, out=tuple(grads))

    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)
    monkeypatch.setattr(peers, "load_fa3", lambda file: None)
    return seen


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_steps_are_right_on_all_caches(case: sets.StepCase, fa3: Any) -> None:
    caches = steps.Caches(case, "cpu", 1)
    check, same = steps.Check(caches), case.cache == "bf16"
    is_one = len({*case.kv_lens}) == 1
    names = ["ours", *["fa3"] * same, *["tensors"] * (same and is_one), *["fa3_plain"] * (is_one and not case.page)]
    for name in names:
        call = steps.prepare(name, caches)
        assert call.count == len(caches.pools) >= 2 and check(call) < steps.TOLERANCE
        with pytest.raises(ArithmeticError, match="it errs by"):
            check(call)  # which takes the second cache
    for name in {"tensors", "fa3_plain", "cudnn", "cudnn_hnd"} - {*names}:
        with pytest.raises((Unserved, RuntimeError)):
            steps.prepare(name, caches)
    broken = call.run().clone()
    broken.view(-1)[-1] = math.nan
    with pytest.raises(ArithmeticError, match="nan"):
        check(Call(lambda: broken))
    assert case.bytes <= sum(x.numel() * x.element_size() for x in caches.pools[0])


def test_steps_in_numbers() -> None:
    big = steps.Caches(STEPS["dense"], "cpu", 1 << 20)
    assert sum(x.numel() * 2 for pools in big.pools for x in pools) >= 1 << 20
    assert sets.flops(small((3, 2), heads=3, kv_heads=3, head_dim=5, chunks=(2,))) == 4 * 3 * 5 * (3 + 2 + 1)
    assert sets.flops(small((3, 2), 0, 2, heads=3, kv_heads=3, head_dim=5)) == 4 * 3 * 5 * (3 + 2 + 2 + 1)
    assert STEPS["window, unequal"].bytes == 2 * 2 * 48 * 2 * 12 and STEPS["e4m3"].bytes == 2 * 64 * 103
    lens = sets.zipf(64, 64 * 4096)
    assert len(lens) == 64 and 0.99 < sum(lens) / (64 * 4096) <= 1.0 and lens[0] > 50_000
    for case in STEPS.values():
        assert sets.from_json(json.loads(json.dumps(sets.to_json(case)))) == case


# ---- contenders of ours


def test_names_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.context, "device", lambda index: DEVICE)
    forward, (gradients,), step = (
        sets.dense(1, 512, 2, 128, True),
        sets.backward([sets.dense(1, 512, 2, 128, True)]),
        sets.step((4096,)),
    )
    asked = "attn_bwd_pair,attn_bwd:order=at_once,attn_fwd/128x96,:split=512,attn_decode+attn_fwd"
    found = [ours.our_names(case, asked, DEVICE)[1:] for case in (forward, gradients, step)]
    assert found == [
        ["ours:attn_fwd/128x96", "ours::split=512"],
        ["ours:attn_bwd_pair", "ours:attn_bwd:order=at_once", "ours::split=512"],
        ["ours:attn_fwd/128x96", "ours::split=512", "ours:attn_decode+attn_fwd"],
    ]
    assert ours.our_options(gradients, "ours:attn_bwd_pair") == {"causal": True, "kernel": "attn_bwd_pair"}
    at_once = ours.our_options(gradients, "ours:attn_bwd:order=at_once+deterministic=False")
    assert (at_once["config"].order, at_once["deterministic"]) == ("at_once", False)
    assert "store=unordered" in ours.chosen(gradients, "ours:attn_bwd_mma:deterministic=False"), "with the name's options"
    assert ours.our_options(step, "ours:attn_decode+attn_fwd") == {"kernel": "attn_decode+attn_fwd"}
    changed = ours.our_options(step, "ours::split=512+cp_async=True+producers=4")
    usual = select(step.op, DEVICE).config
    assert changed == {"split": 512, "config": dataclasses.replace(usual, cp_async=True, producers=4)} and isinstance(
        usual, AttnDecodeConfig
    )
    again = ours.our_options(step, f"ours:{ours.chosen(step, 'ours')}")
    assert again == {"kernel": "attn_decode", "config": usual}, "what was chosen is a name of it"
    names = {source.name for source in ours.sources({gradients: ["ours", "ours:attn_bwd_pair"]}, DEVICE)}
    assert {"attn_fwd.cu", "attn_bwd.cu", "attn_bwd_dkdv.cu"} <= names, "with the forward that gradients need"


def test_who_is_wrong() -> None:
    right, wrong, hole = torch.ones(9), 1.1 * torch.ones(9), torch.full((9,), math.nan)
    found = lambda **outputs: checking.differing({name: (x,) for name, x in outputs.items()})  # noqa: E731
    assert found(ours=right, fa3=right * 1.01, cudnn=right) == {}
    assert found(ours=right, fa3=right, cudnn=wrong) == {"cudnn": pytest.approx(0.1)}
    assert found(ours=wrong, fa3=right, cudnn=right) == {"ours": pytest.approx(1 / 11)}
    assert found(ours=hole, fa3=right) == {"ours": math.inf} == found(ours=hole)
    assert found(fa3=right, cudnn=wrong) == {} == found(ours=right)
    assert [*found(**{"ours": right, "fa3": right, "ours:attn_bwd": hole})] == ["ours:attn_bwd"]


# ---- the whole run on the CPU

SPOTS = [
    *surface.both("tiny, by length", 70, sets.dense(2, 70, 4, 32, True, kv_heads=2)),
    *surface.both("tiny, by queries x keys", "20x90", sets.dense(2, 20, 2, 32, False, kv_len=90)),
    *surface.both("tiny packed", "uneven", surface.together((30, 7, 50), 2, 1, 32, True)),
    *(Spot("dec tiny, by page", str(page), small((70, 33), page, 2)) for page in (0, 16)),
    Spot("dec tiny, by keys", "64", small((64, 64))),
]
US = {"ours": 100.0, "fa3": 90.0, "fa3_auto": 95.0, "fa3_plain": 80.0, "math": 200.0, "tensors": 50.0, "ours::split=64": 120.0}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, fa3: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on ``SPOTS``; gives status, output and record. Contenders take as long as ``US`` says."""

    class Clock(timing.Gpu):
        next = 0.0

        def load(self, call: Call) -> Load:
            call.run()
            return Load(call.run, call.context, Clock.next, 10.0)

        def graph(self, call: Call, launches: int = 20) -> Load:
            assert launches % getattr(call, "count", 1) == 0
            call.run()
            return self.load(call)

        def burst(self, load: Load, seconds: float, rest: float = 0.0) -> list[float]:
            assert seconds == rest == benchmark.LIGHT_SECONDS
            return [load.us] * 3

    prepare, graphs, make, caches = (
        benchmark.Benchmark._prepare,
        benchmark.Benchmark._graphs,
        Task.make.__func__,
        steps.Caches.__init__,
    )

    def prepared(self: Any, name: str, task: Any) -> Call:
        call = prepare(self, name, task)
        Clock.next = US[name]
        return call

    def graphed(self: Any, result: Any, calls: dict[str, Call], loads: dict[str, Load]) -> dict[str, Load]:
        return {name: dataclasses.replace(loads[name], us=US[name]) for name in graphs(self, result, calls, loads)}

    monkeypatch.setattr(Task, "make", classmethod(lambda cls, case, seed: make(cls, case, seed, "cpu")))
    monkeypatch.setattr(steps.Caches, "__init__", lambda self, case: caches(self, case, "cpu", 1))
    monkeypatch.setattr(benchmark.Benchmark, "_prepare", prepared)
    monkeypatch.setattr(benchmark.Benchmark, "_graphs", graphed)
    monkeypatch.setattr(benchmark.Benchmark, "ceilings", lambda self: {"matmul_tflops": 700.0})
    monkeypatch.setattr(timing, "Gpu", Clock)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 8 << 30))
    monkeypatch.setattr(benchmark, "sources", lambda *_: ())
    monkeypatch.setattr(machine, "gpu", lambda tool: DEVICE)
    monkeypatch.setattr(machine.context, "device", lambda index: DEVICE)
    monkeypatch.setattr(machine, "facts", lambda: {"device": "NVIDIA H200", "commit": "abc"})
    for name in ("map", "gate"):
        monkeypatch.setitem(surface.SETS, name, lambda: SPOTS)

    def call(*words: str) -> tuple[int, str, dict[str, Any]]:
        status = tool.main([*words, "--fa3", "x.so", "--out", str(tmp_path), "--peers", "fa3,fa3_auto,math,tensors"])
        out = capsys.readouterr().out
        return status, out, json.loads(pathlib.Path(out.split()[-2]).read_text())

    return call


def test_a_run(run: Any, fa3: list[dict[str, Any]]) -> None:
    status, out, record = run("--ours", ":split=64", "--only", "dec")
    assert status == 0 and "== map: 3 cases, 0 left out, 0 failed; device NVIDIA H200, commit abc" in out
    assert "  0.900 dec tiny, by page: 0: 0.90 (0)  16: 0.90 (0)" in out and "  0.800 dec tiny, by keys: 64: 0.80 (0)" in out
    assert (
        out.index("the worst:")
        < out.index("0.800 dec tiny, by keys: 64: ours 100.0 us, fa3_plain 80.0")
        < out.rindex("0.900 dec tiny")
    )
    assert out.splitlines()[-3].split() == ["dec", "3", "0.865", "0.800", "0.800", "3"]
    dense = next(row for row in record["rows"] if row["x"] == "0")
    assert dense["us"] == {"ours": 100.0, "ours::split=64": 120.0, "fa3": 90.0} and dense["failures"]["fa3_plain"].startswith(
        "takes dense"
    )
    assert dense["chosen"]["ours"].startswith("attn_decode:m_tiles=") and dense["best"] == "fa3" and dense["at"] == 6
    equal = next(row for row in record["rows"] if row["x"] == "64")
    assert equal["us"]["tensors"] == 50.0 and equal["ratios"]["best"] == equal["ratios"]["fa3_plain"] == [0.8, 0.8, 0.8]
    assert record["packs"] == {"0": [70, 33], "16": [70, 33]} and record["ceilings"] == {"matmul_tflops": 700.0}
    assert any("page_table" in each for each in fa3) and all(each["num_splits"] == 0 for each in fa3)
    status, out, record = run()
    assert status == 0 and len(record["rows"]) == 9 and record["machine"] == {"device": "NVIDIA H200", "commit": "abc"}
    forward = next(row for row in record["rows"] if row["axis"] == "fwd tiny, by length")
    assert forward["us"] == {"ours": 100.0, "fa3": 90.0, "fa3_auto": 95.0, "math": 200.0} and "math" not in forward["ratios"], (
        "hopeless"
    )
    assert {each["num_splits"] for each in fa3 if "num_splits" in each} == {0, 1} and any(
        each.get("deterministic") is False for each in fa3
    )
    assert "fwd tiny packed: uneven: 0.90" in out and record["packs"]["uneven"] == [30, 7, 50]


def test_a_failure_of_ours_is_told_with_its_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = backward.ours
    monkeypatch.setattr(backward, "ours", lambda task, *rest: Call(lambda: tuple(2 * x for x in good(task, *rest).run())))
    status, out, record = run("--axis", "queries x keys")
    assert (
        status == 1
        and "2 cases, 0 left out, 1 failed" in out
        and "bwd tiny, by queries x keys: 20x90: ours: apart from the others by 0.5\n" in out
    )
    assert "\n  python -m perf.map --case 3\n" in out and [row["ratio"] for row in record["rows"]] == [0.9, 0.0]
    assert "      - bwd" in out and " 20x90: -" in out
    assert run("--case", "3")[0] == 1 and run("--case", "2")[0] == 0
    assert run("--gate", "--case", "3")[1].count("python -m perf.map --set gate --case 3") == 1
    monkeypatch.setattr(backward, "ours", lambda *_: [].pop())
    assert "20x90: ours: IndexError: pop from empty list" in run("--case", "3")[1]


def test_time_and_room(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, record = run("--seconds", "-1")
    assert (
        status == 0 and "0 cases, 9 left out" in out and len(record["left_out"]) == 9 and run("--gate", "--seconds", "-1")[0] == 1
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 2_000_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(1))
    freed = list[int]()
    tight = {"bwd tiny, by length: 70", *(f"dec tiny, by {x}" for x in ("keys: 64", "page: 0", "page: 16"))}
    assert {*run()[2]["left_out"]} == tight and len(freed) == 9


def test_the_gate_compares(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert run("--gate")[0] == 0 and (tmp_path / "map-gate.txt").exists()
    status, out, record = run("--gate")
    assert status == 0 and "of what it was, 9 cases: fwd 1.000, bwd 1.000, dec 1.000" in out
    monkeypatch.setitem(US, "fa3", 81.0)
    status, out, after = run("--gate")
    assert status == 1 and "bwd tiny, by length: 70 against best: 0.900 -> 0.810" in out and after == record, "the record stays"
    assert "9 cases: fwd 0.900, bwd 0.900, dec 0.932" in out and "by keys: 64 against" not in out
    assert run("--gate", "--update")[0] == 1 and run("--gate")[0] == 0
    old = {"rows": [{"axis": "fwd tiny, by length", "x": "70", "ratio": 0.5}, {"axis": "fwd gone", "x": "1", "ratio": 2.0}]}
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert "1 cases: fwd 1.620, bwd nan, dec nan" in run("--against", str(tmp_path / "old.json"))[1]


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    spots = tool.chosen(tool.arguments().parse_args(["--axis", "packed", "--only", "bwd"]))
    assert len(spots) == 36 and all("packed" in label and label[:3] == "bwd" for label in spots)
    assert [at for at, _ in spots.values()] != sorted(at for at, _ in spots.values()), "shuffled"
    (one,) = tool.chosen(tool.arguments().parse_args(["--seed", "1", "--case", "80"])).values()
    assert one == (80, surface.drawn(1)[80])
    assert tool.main(["--dry", "--only", "fwd", "--axis", "B1 5000 D128 causal"]) == 0
    assert capsys.readouterr().out == "7 cases, 5 kernels, 0 with spills, messages or errors\n"
    with pytest.raises(SystemExit, match="there is no board abacus"):
        tool.main(["--dry", "--arch", "abacus"])


def test_tables() -> None:
    ratios = {"fwd a": (0.5, 2.0, 0.0), "fwd b": (0.8,), "dec c": (1.25, 0.96)}
    rows = [
        {
            "axis": axis,
            "x": str(i),
            "label": f"{axis}: {i}",
            "ratio": ratio,
            "best": "fa3",
            "gbs": 7,
            "us": {"ours": us, "fa3": us * ratio},
        }
        for axis, own in ratios.items()
        for i, (ratio, us) in enumerate(zip(own, (10.0, 30.0, 30.0), strict=False))
    ]
    assert tool.lines(rows) == [
        "  1.000 fwd a: 0: 0.50  1: 2.00  2: -", "  0.800 fwd b: 0: 0.80", "  1.095 dec c: 0: 1.25 (7)  1: 0.96 (7)",
    ]  # fmt: skip
    assert tool.worst(rows, 2) == ["  0.500 fwd a: 0: ours 10.0 us, fa3 5.0", "  0.800 fwd b: 0: ours 10.0 us, fa3 8.0"]
    assert [row[1:] for row in tool.summary(rows)[1:]] == [
        ["3", "0.928", "0.800", "2.000", "2"], ["0", "nan", "nan", "nan", "0"], ["2", "1.095", "1.095", "0.960", "0"],
    ]  # fmt: skip


CALLS = """
import json, sys, torch
from perf.lib import stand_in
stand_in.POOL = 1 << 30
stand_in.install()
from perf.lib import backward, ours, peers, sets, steps, surface
from perf.lib.task import Task
from rawattn.compile import compiler
from rawattn.runtime.select import select
torch.randn = lambda *size, generator=None, **more: torch.empty(*size, **more)
asked, before, compiled = set(), set(), compiler.compile_together
compiler.compile_together = lambda source, *rest: asked.add(source.key) or compiled(source, *rest)
for spot in {spot.axis: spot for spot in [*surface.gate(), *surface.drawn(4, 4)]}.values():
    before |= {source.key for source in ours.sources({spot.case: ["ours"]}, stand_in.DEVICE)}
    if isinstance(spot.case, sets.StepCase):
        steps.prepare("ours", steps.Caches(spot.case, "cpu", 1))
    else:
        task = Task.make(spot.case, device="cpu")
        (backward.prepare("ours", task) if sets.is_backward(spot.case) else peers.prepare("ours", task, {})).run()
    if asked - before:
        print(spot.axis, spot.x)
print(len(asked) > 40)
"""


def test_what_calls_need_was_compiled_before() -> None:
    """On the stand-in for a GPU: no contender of ours compiles when its turn comes."""
    pytest.importorskip("cuda.bindings.driver")
    ran = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, cwd=machine.ROOT)
    assert (ran.stdout, ran.returncode) == ("True\n", 0), ran.stdout + ran.stderr[-3000:]
