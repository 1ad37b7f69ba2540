"""perf.parallel: the model, and the program on two processes without a GPU."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from perf.parallel import Rates, predict

RATES = Rates(600e12, 500e12, 350e9, 0.0, 4e12)
FREE = Rates(600e12, 500e12, 1e30, 0.0, 1e30)  # a link and a memory that take no time


def test_model() -> None:
    """Without transfers n GPUs are n times as fast; and it is where a step takes a transfer's time that they begin to show."""
    for count in (2, 8, 64):
        found = predict(count, 1 << 20, 16, 4, 128, FREE)
        assert [one / count / many for one, many in zip(found.one, found.many, strict=True)] == pytest.approx([1.0, 1.0])
        for kv_heads in (2, 16):
            tokens = predict(count, 1 << 20, 16, kv_heads, 128, RATES).hidden[0]
            shorter, at, longer = (
                predict(count, int(tokens * x), 16, kv_heads, 128, RATES._replace(memory=1e30)) for x in (0.5, 1, 2)
            )
            shares = [each.one[0] / count / each.many[0] for each in (shorter, at, longer)]
            assert shares[1:] == pytest.approx([1.0, 1.0], abs=1e-3) and shares[0] < 0.8
    one = predict(2, 16384, 16, 16, 128, RATES).one[0]
    assert one == pytest.approx(4 * 16 * 128 * 16384**2 / 2 / 600e12)


def test_two_processes(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    out = tmp_path / "parallel.json"
    words = "--cpu 2 --lengths 64 --rounds 1 --heads 2 --head-dim 8 --no-peer --out"
    command = [sys.executable, "-W", "ignore", "-m", "perf.parallel", *words.split(), str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=180, cwd=pathlib.Path(__file__).parents[2])
    found = json.loads(out.read_text())
    assert [check["right"] for check in found["checks"]] == [True] and len(found["link"]) == 1
    assert [(row["what"], row["tokens"]) for row in found["rows"]] == [("forward", 64), ("forward and backward", 64)]
    assert all(row["efficiency"] == pytest.approx(row["one_ms"] / 2 / row["many_ms"]) for row in found["rows"])
