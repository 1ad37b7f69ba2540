"""The numbers of a small package that was made for it."""

from __future__ import annotations

import pathlib

import pytest

from perf import house

FILES = {
    "__init__.py": "from .top import f\n",
    "errors.py": "class Error(Exception): ...\n",
    "low/__init__.py": "",
    "low/table.py": "from ..errors import Error\nkept = {}\n@functools.cache\ndef f(x): return hasattr(x, 'y')\n",
    "top.py": "from .low.table import f\nclass Error: ...\ndef g():\n    from .other import h\n    return h\n",
    "other.py": "from . import top\ndef h(a, b, c, d, e, f, g, *, i, j, k, l): ...\n",
}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in FILES.items():
        (tmp_path / "rawattn" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "rawattn" / name).write_text(text)
    return tmp_path


def test_counts(root: pathlib.Path) -> None:
    assert house.counts(root) == {
        "lines": 12, "files": 5, "files at the top": 3, "rooms": 4, "floors": 4, "imports between rooms": 3,
        "rooms in circles": 0, "imports in functions": 1, "caches": 2, "functions": 3,
        "functions of 11 parameters or more": 1, "lines of signatures": 1,
        "class names that stand twice or more": 1, "questions by hasattr": 1,
    }  # fmt: skip


def test_a_circle_shares_a_floor(root: pathlib.Path) -> None:
    (root / "rawattn" / "top.py").write_text("from .low import table\nfrom . import other\n")
    graph = house.rooms(house.modules(root))
    assert house.floors(graph) == {"errors": 1, "low": 2, "other": 3, "top": 3}
    assert house.counts(root)["rooms in circles"] == 2
