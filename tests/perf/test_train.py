"""perf.memory and perf.train without a GPU: the contenders of a step of training, on the CPU, at tiny sizes."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import types
from typing import Any

import pytest

import rawattn
from perf import memory, train
from perf.lib import differentiable, machine, sets
from rawattn.command import timing
from rawattn.driver.device import TYPICAL

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashAttention 3 with its operators' signatures, computed by ours."""

    def fwd(q: Any, k: Any, v: Any, *, softmax_scale: float, is_causal: bool, num_splits: int) -> Any:
        return (*rawattn.attention(q, k, v, causal=is_causal, scale=softmax_scale, return_lse=True), None, None)

    def bwd(do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *grads: Any, softmax_scale: float, is_causal: bool) -> None:
        assert all(x.is_contiguous() for x in (do, *grads))
        rawattn.attention_backward(do, q, k, v, o, lse, causal=is_causal, scale=softmax_scale, out=grads)

    monkeypatch.setattr(torch.ops, "flash_attn_3", types.SimpleNamespace(fwd=fwd, bwd=bwd), raising=False)
    differentiable.fa3.cache_clear()
    yield differentiable.fa3()
    differentiable.fa3.cache_clear()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_contenders_compute_the_same(fa3: Any, causal: bool, compiled: bool) -> None:
    """On the parts of a projection, as a model gives them."""
    torch._dynamo.reset()
    base = torch.randn(2, 20, 3, 4, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = []
    for attend in (*differentiable.contenders("math").values(), fa3):
        run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
        found.append(torch.autograd.grad(run(*base.unbind(2), causal).sin().sum(), base)[0])
    assert float(found[0].abs().max()) > 0.1
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-5)


def test_contenders_that_are_not_here(monkeypatch: pytest.MonkeyPatch, fa3: Any) -> None:
    assert list(differentiable.contenders("fa3,cudnn,fa2")) == ["ours", "cudnn", "fa2"]
    with pytest.raises(SystemExit, match="no nobody here; there are cudnn"):
        differentiable.contenders("nobody")
    loaded: list[str] = []
    monkeypatch.setattr(differentiable.peers, "load_fa3", loaded.append)
    assert list(differentiable.contenders("fa3", "file.so")) == ["ours", "fa3"] and loaded == ["file.so"]


# ---- perf.memory


class Clock(timing.Gpu):
    """Says that each run takes one MiB more than the one before."""

    def __init__(self) -> None:
        self.torch, self.device, self.peak = torch, "cpu", 0

    def peak_bytes(self, run: Any) -> int:
        assert [x.shape for x in run()] == [(1, 30, 2, 16), (1, 30, 1, 16), (1, 30, 1, 8)]
        self.peak += 1 << 20
        return self.peak


CASE = sets.dense(1, 30, 2, 16, True, kv_heads=1, head_dim_v=8)


def broken(*given: Any) -> Any:
    raise RuntimeError("an error\nwith details")


def test_memory() -> None:
    found = memory.measure(
        Clock(), [CASE], {"ours": differentiable.ours, "math": differentiable.contenders("math")["math"], "b": broken}
    )
    o, lse, gradients = 2 * 30 * 2 * 8, 4 * 30 * 2, 2 * 30 * (2 * 16 + 16 + 8)
    assert found[0]["least"] == (o + lse + gradients) / 2**20
    assert (found[0]["ours"], found[0]["math"], found[0]["failures"]) == (1, 2, {"b": "RuntimeError: an error"})
    rows = memory.table(
        [{"label": "a", "least": 1.0, "ours": 2.0, "fa3": 4.0}, {"label": "b", "least": 2.0, "ours": 2.0}], ["ours", "fa3"]
    )
    assert rows[1:] == [
        ["a", "1.0", "2.0", "4.0"],
        ["b", "2.0", "2.0", "-"],
        ["ours over, mean", f"{math.sqrt(2):.3f}", "1.000", "0.500"],
        ["ours over, most", "2.000", "1.000", "0.500"],
    ]


def test_memory_of_what_a_step_does_not_take() -> None:
    (row,) = memory.measure(Clock(), [sets.packed(3, 64, tokens=50)], {"ours": differentiable.ours})
    assert row["failures"] == {"ours": "no lengths"}


# ---- perf.train


def options_of(text: str) -> argparse.Namespace:
    return train.arguments().parse_args(text.split())


TINY = "--layers 2 --heads 2 --head-dim 16 --batch 2 --length 24 --rounds 2"


@pytest.mark.parametrize("how", ["", "--compile"])
def test_steps(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The same weights and tokens for all, so the same loss; one that fails leaves the others alone."""
    torch._dynamo.reset()
    monkeypatch.setattr(train, "VOCABULARY", 50)
    compile_of = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: compile_of(self, backend="aot_eager", **more))
    attends = {"ours": differentiable.ours, "broken": broken, "math": differentiable.contenders("math")["math"]}
    found = train.measure(attends, options_of(f"{TINY} {how}"), "cpu")
    assert list(found) == list(attends) and "failure" in found["broken"]
    ours, math_s = found["ours"], found["math"]
    assert ours["loss"] == pytest.approx(math_s["loss"], rel=1e-2) and ours["loss"] == pytest.approx(math.log(50), rel=0.3)
    assert len(ours["rounds"]) == 2 and min(ours["rounds"]) <= ours["ms"] <= max(ours["rounds"])
    assert ours["tokens_per_s"] == pytest.approx(2 * 24 / ours["ms"] * 1e3)


def test_blocks_alone() -> None:
    """Without tokens, and so without logits: the same loss for all, and another for another attention."""
    attends = {"ours": differentiable.ours, "math": differentiable.contenders("math")["math"]}
    attends["larger"] = lambda q, k, v, _: rawattn.attention(q, k, 3 * v, causal=True)
    losses = [row["loss"] for row in train.measure(attends, options_of(f"{TINY} --blocks-alone"), "cpu").values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0] != pytest.approx(losses[2], rel=1e-2)


def test_a_wrong_attention_shows_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that sees the next token learns to copy it."""
    monkeypatch.setattr(train, "VOCABULARY", 50)
    attends = {"ours": differentiable.ours, "future": lambda q, k, v, _: rawattn.attention(q, k, v, window=(0, 1))}
    found = train.measure(attends, options_of(f"{TINY} --rounds 8"), "cpu")
    assert abs(found["future"]["loss"] - found["ours"]["loss"]) > 5e-3


def test_files(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"ms": 4.0, "rounds": [4.0], "tokens_per_s": 100.0, "peak_gib": 1.5, "loss": 2.0}
    monkeypatch.setattr(train, "measure", lambda *_: {"ours": row, "fa2": {**row, "ms": 5.0}, "cudnn": {"failure": "why"}})
    monkeypatch.setattr(
        memory, "measure", lambda *_: [{"label": "a", "least": 1.0, "ours": 2.0, "cudnn": 3.0, "failures": {"fa2": "no"}}]
    )
    monkeypatch.setattr(machine, "gpu", lambda tool: TYPICAL["sm_90a"])
    for tool, words in ((train, "1.250"), (memory, "a: fa2: no")):
        name = tool.__name__.rpartition(".")[2]
        assert tool.main(["--out", str(tmp_path)]) == 0
        assert words in capsys.readouterr().out
        fields = json.loads((tmp_path / f"{name}.json").read_text())
        assert {"machine", "rows"} <= set(fields) and "| ours" in (tmp_path / f"{name}.md").read_text()
