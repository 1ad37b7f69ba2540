"""The bound of the cache folder, and what was used when: under faults, and with several processes. No GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from rawattn.compile import cache, compiler
from rawattn.errors import ProblemError

SOURCE = compiler.Source("kernel.cu", "", (), "sm_90a")
KB = 1000
# Stores kernels of 10 kB under names of its own, as fast as it can, and asks for each again: it may have been removed.
WRITER = """\
import os, sys
from rawattn.compile import compiler
compiler._run_nvrtc = lambda source: compiler.Binary(os.urandom(10000), "", "13.0", 0.0, "compiled", source.key)
for i in range(60):
    source = compiler.Source("kernel.cu", f"// {sys.argv[1]} {i}", (), "sm_90a")
    assert compiler.compile(source).origin == "compiled"
    compiler._memory.clear()
    assert compiler.compile(source).origin in ("disk", "compiled")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, in memory and on disk, of 100 kB, and a compiler whose kernels have 10 kB."""

    def compiled(source: compiler.Source) -> compiler.Binary:
        return compiler.Binary(bytes(10 * KB - 200), "", "13.0", 0.0, "compiled", source.key)

    monkeypatch.setattr(compiler, "_run_nvrtc", compiled)
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAWATTN_CACHE_GB", "0.0001")
    compiler._memory.clear()
    cache.warned.clear()
    return tmp_path / "cache"


def source(number: int) -> compiler.Source:
    return dataclasses.replace(SOURCE, text=f"// {number}")


def compile(*numbers: int) -> list[str]:
    """As in processes of their own, one after the other."""
    compiler._memory.clear()
    return [compiler.compile(source(number)).origin for number in numbers]


def path(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / compiler.entry_name(source(number))


def days_old(days: float, *paths: pathlib.Path) -> None:
    for each in paths:
        os.utime(each, (0, time.time() - days * cache.DAY))


def kept(folder: pathlib.Path, numbers: range) -> list[int]:
    return [number for number in numbers if path(folder, number).exists()]


def size(folder: pathlib.Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def test_longest_unused_goes_first(folder: pathlib.Path) -> None:
    compile(*range(10))
    assert kept(folder, range(10)) == [*range(10)]
    for number in range(10):
        days_old(20 - number, path(folder, number))
    assert compile(3, 0) == ["disk", "disk"]
    compile(10, 11, 12)
    assert kept(folder, range(13)) == [0, 3, *range(5, 13)]
    assert size(folder) <= 100 * KB


def test_use_is_noted_once_a_day(folder: pathlib.Path) -> None:
    """A hit writes nothing, else."""
    compile(1)
    for days, is_noted in ((0.5, False), (0.99, False), (1.01, True), (400, True), (-0.5, True), (-9999, True)):
        days_old(days, path(folder, 1))
        assert compile(1) == ["disk"]
        assert (abs(time.time() - path(folder, 1).stat().st_mtime) < 60) is is_noted, days


def test_all_that_is_ours_counts(folder: pathlib.Path) -> None:
    """clear removes Numba's files and NVRTC's refusals, too; files of others neither count nor go."""
    compile(1)
    ours = [folder / "failed" / ("0" * 64) / "ptx" / "base.cuh", folder / "numba" / "x" / "cpu.nbi"]
    foreign = [folder / "mine.cubin", folder / "photos" / "a.nbi", folder / "numba" / "mine"]
    for each in (*ours, *foreign):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(bytes(200 * KB))
    days_old(9, *ours, *foreign)
    compile(2)
    assert not any(each.exists() for each in ours) and all(each.exists() for each in foreign)
    assert kept(folder, range(3)) == [1, 2]


def test_what_was_just_made_stays(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it alone is over the limit, and after a clock that runs ahead was set back."""
    monkeypatch.setenv("RAWATTN_CACHE_GB", "1e-6")
    assert compile(1, 2) == ["compiled"] * 2 and kept(folder, range(3)) == [2]
    days_old(-100, path(folder, 2))
    assert compile(3) == ["compiled"] and kept(folder, range(4)) == [3]


@pytest.mark.parametrize("given", ["two", "-1", "0", "nan", "2GB"])
def test_a_limit_that_is_none(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_CACHE_GB", given)
    with pytest.raises(ProblemError, match=f"RAWATTN_CACHE_GB is '{given}'; it must be a number > 0"):
        compile(1)


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, limit in (("", 2e9), ("0.5", 5e8), ("1e3", 1e12), ("inf", float("inf"))):
        monkeypatch.setenv("RAWATTN_CACHE_GB", given)
        assert cache.limit() == limit
    monkeypatch.delenv("RAWATTN_CACHE_GB")
    assert cache.limit() == 2e9


# ---- clocks


def test_files_of_the_future_grow_old_from_now_on(folder: pathlib.Path) -> None:
    """A clock was years ahead while they were written; else they would outlive all that is used."""
    compile(*range(10))
    days_old(-2000, *(path(folder, number) for number in range(5)))
    listed = cache.files(folder)
    assert {each.used <= time.time() for each in listed} == {True}
    assert all(path(folder, number).stat().st_mtime <= time.time() for number in range(10))
    assert compiler.clear(unused=cache.DAY) == (0, 0), "they were used now, as far as anybody knows"


def test_clock_that_jumps_ahead(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All looks old then: the order stays, and nothing goes that need not."""
    compile(*range(10))
    for number in range(10):
        days_old(0.5 - number / 100, path(folder, number))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3000 * cache.DAY)
    compile(10, 11)
    assert kept(folder, range(12)) == [*range(2, 12)]


# ---- faults


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[[pathlib.Path], bool], error: OSError) -> None:
    """Has a function of a path raise where ``when`` says so."""
    real = getattr(owner, name)

    def replaced(given: Any, *args: Any, **options: Any) -> Any:
        if when(pathlib.Path(given)):
            raise error
        return real(given, *args, **options)

    monkeypatch.setattr(owner, name, replaced)


@pytest.mark.parametrize("name", ["lstat", "unlink"])
def test_a_file_that_vanishes(folder: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between being listed and being looked at, and between that and being removed: its bytes are gone all the same."""
    compile(*range(10))
    days_old(9, *(gone := [path(folder, number) for number in range(3)]))
    real = getattr(pathlib.Path, name)

    def vanish(self: pathlib.Path, *args: Any, **options: Any) -> Any:
        if self in gone:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self)
        return real(self, *args, **options)

    monkeypatch.setattr(pathlib.Path, name, vanish)
    compile(10)
    assert kept(folder, range(3, 11)) == [*range(3, 11)]
    assert compiler.clear()[0] == 8


def test_a_folder_that_vanishes(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "failed" / ("0" * 64)).mkdir(parents=True)
    compile(*range(3))
    failing(monkeypatch, os, "scandir", lambda given: given.name in ("failed", "numba", "0" * 64), FileNotFoundError("gone"))
    assert len([each for each in cache.files(folder) if each.path.suffix == ".cubin"]) == 3
    monkeypatch.undo()
    assert cache.files(folder / "nowhere") == []


def test_a_file_that_cannot_be_removed(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go in its place, and nobody is bothered; ``clear`` says it."""
    compile(*range(10))
    days_old(9, path(folder, 0))
    days_old(8, path(folder, 1))
    failing(monkeypatch, pathlib.Path, "unlink", lambda given: given == path(folder, 0), PermissionError("not yours"))
    compile(10)
    assert kept(folder, range(11)) == [0, *range(2, 11)]
    with pytest.raises(PermissionError, match="not yours"):
        compiler.clear()


def test_a_folder_that_cannot_be_written(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in it are served, though nobody can note that they were used."""
    compile(1)
    days_old(40, path(folder, 1))
    failing(monkeypatch, os, "utime", lambda given: True, OSError(30, "Read-only file system"))
    assert compile(1) == ["disk"] and path(folder, 1).stat().st_mtime < time.time() - 39 * cache.DAY
    failing(monkeypatch, pathlib.Path, "unlink", lambda given: True, OSError(30, "Read-only file system"))
    with pytest.raises(OSError, match="Read-only"):
        compiler.clear()


def test_other_writers_are_left_alone(folder: pathlib.Path) -> None:
    """A file that another process writes at this moment is not removed for its size."""
    compile(*range(9))
    writing = folder / f"{compiler.entry_name(SOURCE)}.{'0' * 32}.tmp"
    writing.write_bytes(bytes(50 * KB))
    days_old(0.01, writing)
    compile(9)
    assert writing.exists() and len(kept(folder, range(10))) == 5
    days_old(1, writing)
    compile(10)
    assert not writing.exists()


def test_eight_processes(folder: pathlib.Path) -> None:
    """They write and remove at the same time: nobody fails or warns, and the bound holds in the end."""
    commands = [[sys.executable, "-W", "error", "-c", WRITER, str(number)] for number in range(8)]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate(timeout=100)[1] for process in started]
    assert errors == [""] * 8
    compile(0)
    assert 50 * KB < size(folder) <= 100 * KB
    assert not list(folder.glob("*.tmp"))


# ---- clear --unused


def test_clear_of_what_is_unused(folder: pathlib.Path) -> None:
    compile(*range(6))
    refused = folder / "failed" / ("0" * 64) / "kernel.cu"
    refused.parent.mkdir(parents=True)
    refused.write_text("text")
    days_old(31, path(folder, 0), path(folder, 1), refused, *folder.glob("*.lock"))
    locks = [*folder.glob("*.lock")]
    assert compile(1) == ["disk"]
    assert compiler.clear(unused=30 * cache.DAY) == (2, 4 + path(folder, 1).stat().st_size)
    assert kept(folder, range(6)) == [1, 2, 3, 4, 5] and not (folder / "failed").exists()
    assert [*folder.glob("*.lock")] == locks, "another process may hold one"
    assert compiler.compile(source(1)).origin == "memory", "what this process has loaded stays"
    assert compiler.clear()[0] == 5 and not [*folder.iterdir()]
