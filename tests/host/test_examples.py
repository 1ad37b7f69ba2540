"""The examples at a tiny size: they check what they compute."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("window", [[], ["--window", "20"]])
def test_generate(window: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """More requests than pages for all of them at once, prompts in parts, and pages that are given back."""
    sizes = ["--requests", "5", "--tokens", "4", "--prompt", "50", "--pages", "12", "--page-size", "8", "--rows", "40"]
    requests = example("generate").main([*sizes, *window])
    assert all(len(request.times) == 4 for request in requests)
    assert "20 tokens of 5 requests" in capsys.readouterr().out


def test_generate_is_checked() -> None:
    generate = example("generate")
    model = generate.Model(generate.Shape(layers=1), "cpu", generate.torch.float32)
    request = generate.Request([1, 2, 3], 2, 1)
    best = int(generate.eager(model, [1, 2], None)[-1].argmax())
    generate.check(model, generate.Request([1, 2, best], 2, 1), None, 1e-3)
    if best != 3:
        with pytest.raises(SystemExit, match="is behind the likeliest one"):
            generate.check(model, request, None, 1e-3)
