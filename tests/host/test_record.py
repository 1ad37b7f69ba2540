"""``pytest --resume``: a run goes on where one before it was cut."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS = """
import os, pytest

@pytest.mark.parametrize("i", range(4))
def test_some(i):
    if i == 2 and "FAILS" in os.environ:
        raise AssertionError
    if i == 3:
        pytest.skip("not here")
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_resume(workers: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    words = [sys.executable, *f"-m pytest -q -n {workers} -p tests.record --resume done --rootdir . {file.name}".split()]

    def run(**env: str) -> str:
        every = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        every.pop("PYTEST_XDIST_WORKER", None)
        return subprocess.run(words, cwd=tmp_path, env=every, capture_output=True, text=True, check=False).stdout

    assert "1 failed, 2 passed, 1 skipped" in run(FAILS="1")
    assert "1 passed, 1 skipped" in (said := run()) and "failed" not in said
    assert sorted((tmp_path / "done").read_text().splitlines()) == [f"test_some.py::test_some[{i}]" for i in range(3)]
