"""The examples at a tiny size."""

from __future__ import annotations

import importlib.util
import math
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLES / "train_gpt.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_train_gpt(example: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns a text of nine letters by heart, and writes it."""
    (tmp_path / "text").write_text("once more" * 30)
    sizes = "--layers 1 --width 32 --heads 2 --length 18 --batch 8 --steps 80 --rate 1e-2 --write 18 --device cpu"
    losses = example.main(["--text", str(tmp_path / "text"), *sizes.split()])
    assert losses[0] > math.log(8) - 0.5 and len(losses) == 80 and losses[-1] < 0.1
    printed = capsys.readouterr().out
    assert printed.strip().endswith("once more" * 3) and "loss of 80 steps" in printed
    assert printed.count("●") == 64


def test_it_sees_nothing_of_the_future(example: Any) -> None:
    torch.manual_seed(0)
    model, tokens = example.GPT(9, 24, 2, 32, 4), torch.randint(9, (1, 24))
    logits = model(tokens)
    tokens[0, 12] = (tokens[0, 12] + 1) % 9
    same = (model(tokens) == logits).all(-1)[0]
    assert same[:12].all() and not same[12:].any()


def test_curve(example: Any) -> None:
    drawn = example.curve([4.0, 4.0, 3.0, 2.0], columns=4, rows=3).splitlines()
    assert drawn == ["  4.00 │●●  ", "       │  ● ", "  2.00 │   ●", "       └────", "        loss of 4 steps"]
    assert example.curve([1.0] * 200).count("●") == 64
