"""``python -m rawattn bench`` on the CPU, at tiny sizes, and the layers that it reads in the configs of models."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest

from rawattn import __main__ as command_line
from rawattn import errors, reference
from rawattn.command import bench, demo, timing
from rawattn.driver import context
from rawattn.driver.device import TYPICAL
from rawattn.driver.device import cpu as this_cpu
from rawattn.errors import ProblemError
from rawattn.runtime import model_config
from rawattn.runtime.model_config import Layer

TINY = ["--heads", "2", "--head-dim", "16", "--lengths", "8,24", "--tokens", "48"]
CONFIGS: list[tuple[dict[str, Any], list[Layer]]] = [
    (
        {
            "architectures": ["LlamaForCausalLM"], "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
            "torch_dtype": "bfloat16",
        },
        [Layer("full", 32, 8, 128, 128)],
    ),
    (
        {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "hidden_size": 2304, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "query_pre_attn_scalar": 256, "torch_dtype": "float32",
        },
        [
            Layer("full", 8, 4, 256, 256, "fp32", True, None, 50.0, 1 / 16),
            Layer("window 4096", 8, 4, 256, 256, "fp32", True, 4096, 50.0, 1 / 16),
        ],
    ),
    (
        {"model_type": "mistral", "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 4096},
        [Layer("window 4096", 32, 8, 128, 128, window=4096)],
    ),
    (
        {"n_heads": 28, "num_kv_heads": 4, "d_model": 3584, "sliding_window": 9, "use_sliding_window": False},
        [Layer("full", 28, 4, 128, 128)],
    ),
    (
        {
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"], "dtype": "float16",
        },
        [Layer("full", 64, 8, 64, 64, "fp16", sinks=True), Layer("window 128", 64, 8, 64, 64, "fp16", window=128, sinks=True)],
    ),
    (
        {
            "num_attention_heads": 128, "num_key_value_heads": 128, "hidden_size": 7168, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
        [Layer("full", 128, 128, 192, 128)],
    ),
    ({"architectures": ["BertModel"], "n_head": 12, "n_embd": 768}, [Layer("full", 12, 12, 64, 64, causal=False)]),
    ({"architectures": ["GPT2LMHeadModel"], "n_head": 12, "n_embd": 768}, [Layer("full", 12, 12, 64, 64)]),
    ({"n_head": 48, "n_embd": 6144, "multi_query": True}, [Layer("full", 48, 1, 128, 128)]),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise errors.UnsupportedError("there is no NVIDIA driver")

    monkeypatch.setattr(context, "library", missing)
    monkeypatch.setattr(bench, "ON_CPU", dataclasses.replace(bench.ON_CPU, rounds=2, seconds=0.0))


@pytest.fixture
def torch(one_thread: None) -> Any:
    return pytest.importorskip("torch")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command_line.main(["bench", *arguments]) == 0
    return capsys.readouterr().out


# ---- the layers of models


@pytest.mark.parametrize("config, layers", CONFIGS)
def test_layers(config: dict[str, Any], layers: list[Layer], tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert model_config.read(path) == layers
    path.write_text(
        json.dumps({"model_type": "of images, too", "text_config": config, "vision_config": {"num_attention_heads": 3}})
    )
    assert model_config.read(path)[0].heads == layers[0].heads


@pytest.mark.parametrize(
    "config, reason",
    [
        ('{"n_head": 12, "n_embd": 770}', "has a hidden size of 770 and 12 heads; it must be a multiple of them"),
        ("\udcff\udcfe", "is no config.json of a transformers model"),
        ("no", "is no config.json of a transformers model"),
        ("[]", "is no config.json of a transformers model"),
        ("{}", "has None under num_attention_heads or n_head or .*; it must be an int >= 1"),
        ('{"num_attention_heads": [8, 16]}', r"has \[8, 16\] under .*; it must be an int"),
        ('{"num_attention_heads": 8}', "has None under hidden_size or n_embd or d_model; it"),
        ('{"n_head": 8, "n_embd": 512, "layer_types": ["chunked_attention"]}', "has layers of the kind chunked; full and"),
    ],
)  # fmt: skip
def test_configs_that_are_none(config: str, reason: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(config, errors="surrogateescape")
    with pytest.raises(ProblemError, match=f"config.json {reason}"):
        model_config.read(tmp_path / "config.json")


# ---- what is timed


def test_a_table_beside_torch(torch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *TINY, "--causal")
    assert "CPU, arrays of torch, 48 tokens a call, medians of 2 rounds" in out
    assert "attention, fp32, 2 heads of 16, causal: GFLOP/s" in out
    rows = re.findall(r"│ +(\d+ x \d+) │ +(\w+) │ +([\d.e-]+) │ +([\d.e-]+) │ +([\d.e-]+) │ +([\d.]+) │", out)
    assert [row[:2] for row in rows] == [(size, each) for size in ("6 x 8", "2 x 24") for each in bench.PASSES]
    for row in rows:
        ours, *others, ratio = map(float, row[2:])
        assert abs(ratio - ours / max(others)) < 0.02 + 0.01 * ratio


def test_a_model(torch: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both kinds of its layers; what is asked for by name goes before what it has, and torch has no softcap."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[1][0] | {"sliding_window": 9}))
    sizes = [*TINY[:2], "--kv-heads", "1", "--head-dim", "16", "--head-dim-v", "8", *TINY[4:]]
    out = run(capsys, "--like", str(tmp_path / "config.json"), *sizes)
    for name in ("full", "window 9"):
        assert f"{name}, fp32, 2/1 heads of 16/8, causal, softcap 50: GFLOP/s" in out
    assert out.count("flash: torch has no softcap and no sinks") == 1 == out.count("math: torch has no softcap and no sinks")


@pytest.mark.parametrize(
    "layer",
    [
        Layer("full", 2, 2, 16, 16, "fp32"),
        Layer("window", 4, 2, 16, 8, "fp32", window=5),
        Layer("both sides", 4, 1, 16, 16, "fp32", causal=False, window=5, scale=0.5),
        Layer("all", 2, 2, 16, 16, "fp32", causal=False),
    ],
)
def test_contenders_compute_the_same(torch: Any, layer: Layer) -> None:
    """And what the layer is, by the reference."""
    found = bench.Bench(this_cpu(), "torch")
    op = bench.operation(layer, 2, 40)
    arrays = found._make_inputs(op)
    calls, reasons = found._make_calls(op, arrays)
    assert set(calls) >= {"rawattn", "math"} and "rawattn" not in reasons
    left = None if layer.window is None else layer.window - 1
    window = None if left is None else (left, 0 if layer.causal else left)
    q, k, v, do = (arrays[name].numpy() for name in ("q", "k", "v", "do"))
    options = {"causal": layer.causal and window is None, "window": window, "scale": layer.scale}
    exact = (reference.attention(q, k, v, **options), *reference.attention_backward(do, q, k, v, **options)[:3])
    for call in calls.values():
        with call["forward"].context():
            results = (call["forward"].run(), *call["backward"].run())
        for x, y in zip(results, exact, strict=True):
            np.testing.assert_allclose(x.detach().numpy(), y, atol=2e-5)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    imported = demo.import_if_there
    monkeypatch.setattr(demo, "import_if_there", lambda name: None if name == "torch" else imported(name))
    out = run(capsys, *TINY, "--dtype", "bf16", "--softcap", "5")
    assert "arrays of numpy" in out and "attention, bf16, 2 heads of 16, softcap 5" in out
    assert len(re.findall(r"x \d+ │ +(?:for|back)ward │ +[\d.e-]+ │ +- │", out)) == 4


def test_sinks_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench.Bench(this_cpu(), "numpy")
    found.measure(Layer("full", 2, 1, 16, 16, "fp16", sinks=True), 1, 16)
    assert [each.name for each in found.results] == ["rawattn"] * 2 and all(each.us for each in found.results)
    assert found.results[0].flops == 2 * 32 * 2 * 136 and found.results[1].flops == 5 * 32 * 136 * 2


def test_what_cannot_be_computed(capsys: pytest.CaptureFixture[str], torch: Any) -> None:
    assert command_line.main(["bench", *TINY[:2], "--head-dim", "2000", *TINY[4:]]) == 1
    assert "rawattn: no kernel computes" in capsys.readouterr().out


def test_time_that_is_over(capsys: pytest.CaptureFixture[str], torch: Any) -> None:
    out = run(capsys, *TINY, "--seconds", "0")
    assert "not measured, as 0 s had passed: attention of 8, attention of 24; --seconds gives more" in out


# ---- the plot


def test_plot(torch: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for suffix, begin in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        path = tmp_path / f"a{suffix}"
        assert f"drawn in {path}" in run(capsys, *TINY, "--plot", str(path))
        assert path.read_bytes().startswith(begin)
    before = path.read_bytes()
    assert command_line.main(["bench", "--plot", str(path)]) == 1 and path.read_bytes() == before
    assert f"--plot is {path}, which exists and would be lost; give another name." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["bench", "--plot"])
    assert command_line.main(["bench", "--plot", str(tmp_path / "a.txt")]) == 1
    assert re.search(r"--plot is .*a\.txt; it must end with one of .*\.png.*\.svg", capsys.readouterr().err)
    assert command_line.main(["bench", "--plot", str(tmp_path / "none" / "a.svg")]) == 1
    assert "there is no folder" in capsys.readouterr().err


def test_what_is_drawn() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    layers = [Layer(name, 1, 1, 8, 8) for name in ("full", "window 9")]
    speeds = {"rawattn": 2.0, "flash": 1.0, "math": None}
    results = [
        bench.Result(layer, 1, length, each, name, us and 1e6 / us / length, 10**12)
        for layer in layers for length in (512, 1024) for each in bench.PASSES for name, us in speeds.items()
    ]  # fmt: skip
    bench.draw(figure, results, TYPICAL["sm_90a"])
    assert [axis.get_title() for axis in figure.axes] == [f"{layer.name}, {each}" for each in bench.PASSES for layer in layers]
    for axis in figure.axes:
        drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        assert drawn == {"rawattn": [[512, 1024], [1024, 2048]], "flash": [[512, 512], [1024, 1024]]}
        assert axis.get_ylabel() == "TFLOP/s" and [tick.get_text() for tick in axis.get_xticklabels()] == ["512", "1024"]


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert command_line.main(["bench", "--plot", "a.svg"]) == 1
    assert "--plot needs matplotlib" in (said := capsys.readouterr().err) and "pip install matplotlib" in said


def test_the_clock_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def work() -> None:
        now[0] += 0.25

    clock = timing.Host()
    load = clock.load(timing.Call(work))
    assert load.us == 250_000 and clock.burst(load, 1.0) == [250_000] * 4 and clock.burst(load, 0.0) == [250_000]
