"""perf.mutate: which mutants there are, and what becomes of them under good tests and bad ones."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import pytest

from perf import mutate

TOY = '''\
"""A toy."""


def clamp(x: int, low: int = 0) -> int:
    if x < low:
        return low
    return x


def count(n: int) -> int:
    found = 0
    while n > 0:
        n -= 1
        found += 1
    return found
'''
GOOD = """\
import pathlib, subprocess, sys, toy

def test_clamp():
    assert [toy.clamp(x) for x in (-1, 0, 1)] == [0, 0, 1] and toy.clamp(1, 5) == 5

def test_count():
    assert [toy.count(n) for n in (0, 1, 3)] == [0, 1, 3]

def test_copy():
    assert toy.__file__ == str(pathlib.Path("toy.py").resolve())
    assert subprocess.run([sys.executable, "-c", "import toy; assert toy.clamp(1, 5) == 5"]).returncode == 0
"""
BAD = """\
import toy

def test_clamp():
    toy.clamp(3)
"""


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = a < b <= c", ["x = a <= b <= c", "x = a < b < c"]),
        ("x = a is not b", ["x = a is b"]),
        ("x = (a) not  in (b)", ["x = (a) in (b)"]),
        ("x = a == 1", ["x = a != 1", "x = a == 2", "x = a == 0"]),
        ("x = a == 0", ["x = a != 0", "x = a == 1", "x = a == (-1)"]),
        ("x = a and b or not c", ["x = a or b or not c", "x = a and b and not c", "x = a and b or  c"]),
        ("x = 'é' + b * c", ["x = 'é' - b * c", "x = 'é' + b // c"]),
        ("x += y << z", ["x -= y << z", "x += y >> z"]),
        ("x = y[a:b]", ["x = y[:b]", "x = y[a:]"]),
        ("x = [y for y in z if y]", ["x = [y for y in z if (not (y))]"]),
        ("if f(x): pass", ["if (not (f(x))): pass"]),
        ("def f(): return (x)", ["def f(): return (None)"]),
        ("def f(): raise E(1)", ["def f(): pass", "def f(): raise E(2)", "def f(): raise E(0)"]),
        ("def f(x: A | B = None) -> C | D: return", []),
        ("x: dict[1, 2] = True", []),
        ("x = f'{a + 1} is {b}'", []),
        ("'a docstring: 1 < 2'", []),
    ],
)
def test_mutants_of_a_line(line: str, changed: list[str]) -> None:
    found = mutate.mutants("toy.py", f"# a comment\n{line}\n")
    assert sorted(each.after for each in found) == sorted(changed)
    assert all((each.line, each.before, each.text) == (2, line, f"# a comment\n{each.after}\n") for each in found)


def run(tree: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perf.mutate", "toy.py", "--jobs", "2", "--timeout", "20", *words],
        cwd=tree, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, text in {"toy.py": TOY, "test_good.py": GOOD, "test_bad.py": BAD}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_good_tests_kill_and_bad_ones_do_not(tree: pathlib.Path) -> None:
    every = len(mutate.mutants("toy.py", TOY))
    good = run(tree, "--tests", "test_good.py", "--timeout", "6", "--record")
    assert good.returncode == 0, good.stderr
    counts = json.loads((tree / mutate.RECORD).read_text())["toy.py"]
    assert counts["mutants"] == every == sum(counts[name] for name in mutate.RESULTS) and counts["sample"] is None
    assert mutate.score({"toy.py": counts}) in good.stdout
    assert len(counts["alive"]) == every - counts["killed"] and "13: n -= 1 -> n += 1" in counts["alive"]
    assert counts["timeout"] >= 1 and "timeout  toy.py:13\n  - n -= 1\n  + n += 1\n" in good.stdout, "a loop without end"
    assert counts["survived"] == 1 and "survived  toy.py:5\n  - if x < low:\n  + if x <= low:\n" in good.stdout, "it is equal"

    bad = run(tree, "--tests", "test_bad.py")
    assert "survived  toy.py:6\n  - return low\n  + return None\n" in bad.stdout
    assert "survived  toy.py:11\n  - found = 0\n  + found = 1\n" in bad.stdout
    assert json.loads((tree / mutate.RECORD).read_text())["toy.py"] == counts, "kept where it is asked for"
    assert (tree / "toy.py").read_text() == TOY and not list(tree.rglob("__pycache__")), "only copies change"


def test_sample(tree: pathlib.Path) -> None:
    """The same for the same seed, in whatever order they end."""
    found = [run(tree, "--tests", "test_bad.py", "--sample", "5", "--seed", "1").stdout for _ in range(2)]
    assert "toy.py: 5 mutants, test_bad.py" in found[0] and "survived" in found[0]
    survived = [sorted(re.findall(r"^survived  toy\.py:\d+\n  - .*\n  \+ .*$", text, re.MULTILINE)) for text in found]
    assert len(survived[0]) >= 2 and survived[0] == survived[1]


def test_tests_that_fail_by_themselves(tree: pathlib.Path) -> None:
    (tree / "test_bad.py").write_text("def test():\n    assert 1 == 2\n")
    found = run(tree, "--tests", "test_bad.py")
    assert found.returncode == 1 and "fail without any fault" in found.stderr and "assert 1 == 2" in found.stderr
    missing = run(tree, "--tests", "test_none.py")
    assert missing.returncode == 2 and "there is no file test_none.py" in missing.stderr


def test_tests_of_a_module() -> None:
    root = pathlib.Path(mutate.__file__).resolve().parents[1]
    assert mutate.tests_of("rawattn/array/tma.py") == ["tests/host/array/test_tma.py"]
    assert mutate.tests_of("rawattn/reference.py") == ["tests/host/test_reference.py"]
    assert mutate.tests_of("perf/map.py") == ["tests/perf/test_map.py"]
    for module in mutate.TESTS:
        assert all((root / path).is_file() for path in (module, *mutate.tests_of(module))), module


def test_the_score_is_told_as_it_is_recorded() -> None:
    root = pathlib.Path(mutate.__file__).resolve().parents[1]
    score = mutate.score(json.loads((root / mutate.RECORD).read_text()))
    assert score in (root / "perf" / "README.md").read_text(), score
