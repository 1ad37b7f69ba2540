"""The code in docs/integrations.md runs."""

from __future__ import annotations

import pathlib
import re

import pytest

pytest.importorskip("torch")
PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block: str) -> None:
    assert len(BLOCKS) == 6
    for name in ("jax", "transformers"):
        if re.search(rf"^import {name}$", block, re.MULTILINE):
            pytest.importorskip(name)
    exec(compile(block, str(PAGE), "exec"), {})
