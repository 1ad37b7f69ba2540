"""The code in docs/ runs, each block by itself. Blocks with a title, which says what they need, are compiled alone."""

from __future__ import annotations

import pathlib
import re

import pytest

pytest.importorskip("torch")
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
BLOCKS = [
    pytest.param(page.name, title, block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, (title, block) in enumerate(re.findall(r"^ *```python(.*)\n((?:.*\n)*?) *```$", page.read_text(), re.MULTILINE))
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("page", "title", "block"), BLOCKS)
def test_block(page: str, title: str, block: str) -> None:
    for name in ("jax", "transformers", "diffusers"):
        if re.search(rf"^ *import {name}(\.|$)", block, re.MULTILINE):
            pytest.importorskip(name)
    indent = len(block) - len(block.lstrip(" "))
    code = compile(re.sub(rf"^ {{{indent}}}", "", block, flags=re.MULTILINE), page, "exec")
    assert title in ("", ' title="needs a GPU"', ' title="needs a C++ compiler"')
    if not title:
        exec(code, {"__name__": "__main__"})


def test_blocks_are_found() -> None:
    pages = {block.values[0] for block in BLOCKS}
    assert pages >= {"index.md", "quickstart.md", "cookbook.md", "integrations.md", "deploy.md"} and len(BLOCKS) > 18
