"""The compiler and its cache, on kernels of a few lines: no GPU is needed."""

from __future__ import annotations

import dataclasses
import json
import linecache
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import filelock
import pytest

from rawattn import errors
from rawattn.compile import cache, compiler
from rawattn.errors import CompileError, RawattnError, UnsupportedError
from tests.threads import at_once

TEXT = """\
#include "config.cuh"
#include "ptx/twice.cuh"
extern "C" __global__ void kernel(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]) + cfg::shift; }
"""
HEADERS = (
    ("ptx/twice.cuh", "#pragma once\n__device__ float twice(float x) { return 2 * x; }\n"),
    ("config.cuh", "#pragma once\nnamespace cfg { constexpr int shift = 1; }\n"),
)
SOURCE = compiler.Source("kernel.cu", TEXT, HEADERS, "sm_90a")
BROKEN = dataclasses.replace(SOURCE, text=TEXT + "#warning not yet\n__device__ int broken() { return missing; }\n")

# Imports compiler.py and compiles SOURCE as this file does, in a process that starts with `prelude`.
PROCESS = """\
import sys, pathlib, time, json
{prelude}
from rawattn.compile import compiler
source = compiler.Source(*json.loads(sys.argv[1]))
source = compiler.Source(source.name, source.text, tuple(map(tuple, source.headers)), source.arch)
print("ready", flush=True)
sys.stdin.readline()
binary = compiler.compile(source)
print(binary.origin, len(binary.cubin), any("nvrtc" in name or "cupy" in name for name in sys.modules))
"""


def process(source: compiler.Source, prelude: str = "", **environment: str) -> subprocess.Popen[str]:
    """A Python process that is ready to compile: it does when it reads a line, and prints origin, bytes, CuPy imported."""
    command = [sys.executable, "-c", PROCESS.format(prelude=prelude), json.dumps(dataclasses.astuple(source))]
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment})
    assert started.stdout is not None and started.stdout.readline() == "ready\n"
    return started


def answer(started: subprocess.Popen[str]) -> list[str]:
    out, err = started.communicate("\n", timeout=100)
    assert started.returncode == 0, err
    return out.split()


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, in memory and on disk."""
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "cache"))
    forget()
    return tmp_path / "cache"


def forget() -> None:
    compiler._memory.clear()
    cache.warned.clear()


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("*.cubin"))


def instructions(cubin: pathlib.Path) -> str:
    """Returns what nvdisasm reads in a file; it refuses a damaged one."""
    try:
        return compiler.disassemble(cubin.read_bytes(), "-c")
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_origins_and_hook(folder: pathlib.Path) -> None:
    calls: list[None] = []
    origins = []
    for _ in range(2):
        origins += [compiler.compile(SOURCE, lambda: calls.append(None)).origin for _ in range(2)]
        forget()
    assert origins == ["compiled", "memory", "disk", "memory"]
    assert len(calls) == 1
    assert [path.name for path in entries(folder)] == [f"kernel-{SOURCE.key}.cubin"]


def test_disk_gives_back_what_was_compiled() -> None:
    compiled = compiler.compile(SOURCE)
    forget()
    assert dataclasses.replace(compiler.compile(SOURCE), origin="compiled") == compiled
    assert compiled.nvrtc == compiler.nvrtc_version()
    assert 0 < compiled.seconds < 60


def test_cubin_is_a_whole_elf_file(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "plain.cubin").write_bytes(compiler.compile(SOURCE).cubin)
    code = instructions(tmp_path / "plain.cubin")
    assert "FADD" in code or "FFMA" in code
    assert instructions(entries(folder)[0]) == code


def test_missing_last_byte() -> None:
    cubin = compiler.compile(SOURCE).cubin
    assert cubin[-1:] == b"\0"
    assert compiler._complete(cubin) == compiler._complete(cubin[:-1]) == cubin


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "other.cu"},
        {"text": TEXT + "\n"},
        {"headers": HEADERS[:1]},
        {"headers": (HEADERS[0], ("config.cuh", HEADERS[1][1].replace("1", "2")))},
        {"headers": (("ptx/thrice.cuh", HEADERS[0][1]), HEADERS[1])},
        {"arch": "sm_80"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_any_change_is_another_key(changed: dict[str, object]) -> None:
    assert dataclasses.replace(SOURCE, **changed).key != SOURCE.key


def test_options_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SOURCE.key
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--use_fast_math"))
    assert dataclasses.replace(SOURCE).key != before


def test_order_of_headers_is_not_in_the_key() -> None:
    assert dataclasses.replace(SOURCE, headers=HEADERS[::-1]).key == SOURCE.key


def test_key_knows_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Neither the folder that the sources are read from nor the current one is in a key: names are relative to cuda_src."""
    from rawattn.driver.device import TYPICAL
    from rawattn.kernel import render
    from rawattn.kernel.attn_fwd import ATTN_FWD
    from rawattn.operation import Forward
    from rawattn.variant.element import BF16

    def source() -> compiler.Source:
        op = Forward(BF16, 1, 512, 512, 8, 8, 64, 64)
        return ATTN_FWD.render(op, ATTN_FWD.candidates(op, TYPICAL["sm_90a"])[0], "sm_90a")

    here = source()
    shutil.copytree(render.FOLDER, tmp_path / "elsewhere")
    monkeypatch.setattr(render, "FOLDER", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    render._read.cache_clear()
    try:
        there = source()
    finally:
        render._read.cache_clear()
    assert there.key == here.key
    texts = [there.name, there.text, *there.options, *(part for header in there.headers for part in header)]
    assert not [text for text in texts if str(tmp_path) in text or str(render.FOLDER) in text]


def test_header_change_compiles_anew(folder: pathlib.Path) -> None:
    shifted = dataclasses.replace(SOURCE, headers=(HEADERS[0], ("config.cuh", HEADERS[1][1].replace("1", "5"))))
    assert compiler.compile(SOURCE).cubin != compiler.compile(shifted).cubin
    assert len(entries(folder)) == 2


def test_only_given_headers_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.cuh").write_text(HEADERS[1][1])
    with pytest.raises(CompileError, match=r"config\.cuh"):
        compiler.compile(dataclasses.replace(SOURCE, headers=HEADERS[:1]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:],
        lambda data: data[:-200] + bytes([data[-200] ^ 1]) + data[-199:],
        lambda data: data[:-30] + bytes([data[-30] ^ 1]) + data[-29:],
        lambda data: data[:-48] + bytes([data[-48] ^ 1]) + data[-47:],
        lambda data: data[:-1] + b"0",
        lambda data: bytes(len(data)),
        lambda data: os.urandom(4096),
    ],
    ids=["empty", "head", "half", "short", "long", "elf bit", "facts bit", "checksum bit", "size bit", "form", "zeros", "noise"],
)
def test_damaged_entry_is_rebuilt(folder: pathlib.Path, damage) -> None:
    whole = compiler.compile(SOURCE)
    entry = entries(folder)[0]
    entry.write_bytes(damage(entry.read_bytes()))
    forget()
    rebuilt = compiler.compile(SOURCE)
    assert (rebuilt.origin, rebuilt.cubin) == ("compiled", whole.cubin)
    forget()
    assert compiler.compile(SOURCE).origin == "disk"


def test_entry_of_another_kernel_is_rebuilt(folder: pathlib.Path) -> None:
    other = dataclasses.replace(SOURCE, arch="sm_80")
    compiler.compile(other)
    entries(folder)[0].rename(folder / f"kernel-{SOURCE.key}.cubin")
    assert compiler.compile(SOURCE).origin == "compiled"


def test_eight_cold_processes_compile_once(folder: pathlib.Path) -> None:
    started = [process(SOURCE) for _ in range(8)]
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    answers = [answer(each) for each in started]
    assert sorted(origin for origin, _, _ in answers) == ["compiled"] + ["disk"] * 7
    assert len({size for _, size, _ in answers}) == 1
    assert sum(imported == "True" for _, _, imported in answers) == 1  # only who compiles imports CuPy
    assert not list(folder.glob("*.tmp"))


def test_eight_threads_compile_once() -> None:
    barrier, origins = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        origins.append(compiler.compile(SOURCE).origin)

    at_once(work, [()] * 8)
    assert sorted(origins) == ["compiled"] + ["memory"] * 7


def test_what_is_compiled_together(folder: pathlib.Path) -> None:
    """If the source is new, the others are compiled beside it, and one that NVRTC refuses does not stop the rest; if it is in the
    cache, they are not even rendered."""
    other, wrong = (dataclasses.replace(SOURCE, text=text) for text in (TEXT + "// another", "no CUDA"))
    assert compiler.compile_together(SOURCE, iter([other, wrong])).origin == "compiled"
    assert len(entries(folder)) == 2 and compiler.compile(other).origin == "memory"
    with pytest.raises(CompileError):
        compiler.compile(wrong)

    def nobody_asks() -> Iterator[compiler.Source]:
        raise AssertionError("rendered for nothing")
        yield other

    for clear in (lambda: None, forget):
        clear()
        assert compiler.compile_together(SOURCE, nobody_asks()).origin in ("memory", "disk")


def test_killed_process_blocks_nobody(folder: pathlib.Path) -> None:
    """A process dies while it holds the lock; its temporary file goes when it is old."""
    hang = "print('held', flush=True), time.sleep(99)"
    dying = process(SOURCE, f"from rawattn.compile import compiler; compiler._run_nvrtc = lambda _: ({hang})")
    assert dying.stdin is not None and dying.stdout is not None
    dying.stdin.write("\n")
    dying.stdin.flush()
    assert dying.stdout.readline() == "held\n"
    old, new = (folder / f"kernel-{SOURCE.key}.cubin.{digit * 32}.tmp" for digit in "01")
    old.write_bytes(b"half an entry")
    new.write_bytes(b"half an entry, being written")
    os.utime(old, (0, time.time() - 2 * cache.STALE_SECONDS))
    dying.send_signal(signal.SIGKILL)
    dying.communicate()
    begin = time.monotonic()
    assert compiler.compile(SOURCE).origin == "compiled"
    assert time.monotonic() - begin < compiler.LOCK_SECONDS / 2
    assert not old.exists() and new.exists()


def test_lock_is_not_waited_for_without_end(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "LOCK_SECONDS", 0.3)
    folder.mkdir()
    held = filelock.FileLock(folder / f"rawattn-{SOURCE.key[:2]}.lock", thread_local=False)
    holder = threading.Thread(target=held.acquire)  # a thread may not wait for a lock that it has itself
    holder.start()
    holder.join()
    try:
        assert compiler.compile(SOURCE).origin == "compiled"
    finally:
        held.release()


def test_lock_files_are_bounded(folder: pathlib.Path) -> None:
    compiler.compile(SOURCE)
    locks = list(folder.glob("*.lock"))
    assert [path.name for path in locks] == [f"rawattn-{SOURCE.key[:2]}.lock"]
    assert locks[0].stat().st_size == 0


def test_a_hit_writes_nothing(folder: pathlib.Path) -> None:
    compiler.compile(SOURCE)
    forget()
    for lock in folder.glob("*.lock"):
        lock.unlink()
    before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
    assert compiler.compile(SOURCE).origin == "disk"
    assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before


def expect_memory_only(reason: str = "") -> None:
    """Compiling works, with one warning for three kernels, and each then comes from memory."""
    sources = [SOURCE, *(dataclasses.replace(SOURCE, arch=arch) for arch in ("sm_80", "sm_89"))]
    with pytest.warns(cache.CacheWarning, match="RAWATTN_CACHE") as caught:
        assert [compiler.compile(source).origin for source in sources[:2]] == ["compiled"] * 2
        assert compiler.compile_together(sources[2], []).origin == "compiled"
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert caught[0].filename == __file__ and "compiler.compile(" in linecache.getline(__file__, caught[0].lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [compiler.compile_together(source, []).origin for source in sources] == ["memory"] * 3
        assert compiler.recompile(SOURCE).origin == "compiled"
        with pytest.raises(CompileError, match="missing"):
            compiler.compile(BROKEN)


def test_folder_that_is_a_file(folder: pathlib.Path) -> None:
    folder.write_text("not a folder")
    expect_memory_only("Not a directory" if folder.is_dir() else "no folder")
    assert folder.read_text() == "not a folder"


def test_parent_that_is_a_file(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("not a folder")
    monkeypatch.setenv("RAWATTN_CACHE", str(folder / "in" / "it"))
    expect_memory_only("Not a directory")


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["x" * 200] * 30)], ids=["name", "path"])
def test_path_that_is_too_long(path: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_CACHE", str(folder / path))
    expect_memory_only("File name too long")


def test_links_that_lead_nowhere(folder: pathlib.Path) -> None:
    folder.symlink_to(folder.with_name("nothing"))
    expect_memory_only("No such file")
    folder.unlink()
    folder.symlink_to(folder)
    forget()
    expect_memory_only("symbolic links")


def test_null_byte(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment can hold none, but whoever sets the variable in Python is told by another message than this one."""
    monkeypatch.setattr(os, "environ", {**os.environ, "RAWATTN_CACHE": f"{folder}\0"})
    expect_memory_only("null byte")


@pytest.mark.parametrize("given", ["~/kernels", "~nobody-of-this-name/kernels", ""], ids=["home", "other home", "default"])
def test_unknown_home(given: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    import pwd

    def unknown(_: object) -> None:
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, name, unknown)
    monkeypatch.setenv("RAWATTN_CACHE", given)
    monkeypatch.chdir(tmp_path)
    expect_memory_only("home folder is unknown")
    assert not list(tmp_path.iterdir()), "no folder by the name of ~"


def test_home_that_platformdirs_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    import platformdirs

    monkeypatch.delenv("RAWATTN_CACHE")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}")  # as versions before 4.4 answer
    with pytest.raises(FileNotFoundError, match="home folder is unknown"):
        cache.cache_folder()


def test_current_folder_that_was_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setenv("RAWATTN_CACHE", "relative")
    expect_memory_only("No such file")
    monkeypatch.chdir(tmp_path)


def test_disk_that_cannot_be_written(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root sees it, whom no mode stops."""

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(pathlib.Path, "mkdir", read_only)
    expect_memory_only("Read-only file system")


def test_one_warning_for_many_threads(folder: pathlib.Path) -> None:
    folder.write_text("not a folder")
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        cache.warn_uncached(OSError("no"))

    with pytest.warns(cache.CacheWarning) as caught:
        at_once(work, [()] * 8)
    assert len(caught) == 1


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_folders_are_for_their_owner_alone(folder: pathlib.Path, umask: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those above the cache folder, where they are missing, under a umask that forbids nothing."""
    monkeypatch.setenv("RAWATTN_CACHE", str(folder / "a" / "b"))
    compiler.compile(SOURCE)
    with pytest.raises(CompileError):
        compiler.compile(BROKEN)
    assert cache.private_folder("numba", "x") == folder / "a" / "b" / "numba" / "x"
    made = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    assert len(made) == 8 and {path.stat().st_mode & 0o7777 for path in made} == {0o700}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702, 0o1777])
def test_folder_that_others_may_write(folder: pathlib.Path, mode: int) -> None:
    """Nothing is read from it, and nothing is written."""
    compiler.compile(SOURCE)
    (entry,) = entries(folder)
    before = entry.read_bytes(), {path.name for path in folder.iterdir()}
    folder.chmod(mode)
    forget()
    expect_memory_only(f"other users may write into {folder}")
    assert f"chmod go-w {folder}" in refusal()
    with pytest.raises(PermissionError, match="chmod go-w"):
        compiler.clear()
    assert (entry.read_bytes(), {path.name for path in folder.iterdir()}) == before
    folder.chmod(0o755)
    forget()
    assert compiler.compile(SOURCE).origin == "disk"


def refusal(*names: str) -> str:
    with pytest.raises(PermissionError) as caught:
        cache.private_folder(*names)
    return str(caught.value)


def test_folder_in_the_cache_that_others_may_write(folder: pathlib.Path) -> None:
    cache.private_folder("numba", "x")
    (folder / "numba").chmod(0o777)
    assert f"chmod go-w {folder / 'numba'}" in refusal("numba") and refusal("numba") == refusal("numba", "x")
    (folder / "numba").chmod(0o700)
    (folder / "numba" / "x").chmod(0o777)
    assert str(folder / "numba" / "x") in refusal("numba", "x")
    assert cache.private_folder("numba").is_dir()


def owned(monkeypatch: pytest.MonkeyPatch, path: pathlib.Path, of_link: int, of_folder: int, me: int = 1000) -> None:
    """As if these users owned the path, and ``me`` ran this."""

    def owner(call: Any, uid: int) -> Any:
        def found(self: pathlib.Path, **options: Any) -> Any:
            facts = call(self, **options)
            return os.stat_result([*facts[:4], uid if self == path else me, *facts[5:10]])

        return found

    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setattr(pathlib.Path, "lstat", owner(pathlib.Path.lstat, of_link))
    monkeypatch.setattr(pathlib.Path, "stat", owner(pathlib.Path.stat, of_folder))


@pytest.mark.parametrize(
    ("of_link", "of_folder", "me", "trusted"),
    [
        (1000, 1000, 1000, True),
        (0, 0, 1000, True),  # what root wants to run here, it can
        (1000, 0, 1000, True),
        (1001, 1001, 1000, False),
        (1001, 1000, 1000, False),  # who owns the link can turn it to any folder
        (1000, 1001, 1000, False),
        (1000, 1000, 0, False),  # root, in the folder of a user
    ],
)
def test_owners(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, of_link: int, of_folder: int, me: int, trusted: bool
) -> None:
    folder.mkdir(0o700)
    owned(monkeypatch, folder, of_link, of_folder, me)
    if trusted:
        assert cache.private_folder() == folder
    else:
        assert f"{folder} belongs to the user with number 100" in refusal()
        expect_memory_only("would run as code of user")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user(folder: pathlib.Path) -> None:
    compiler.compile(SOURCE)
    os.chown(folder, 65534, 65534)
    forget()
    expect_memory_only("belongs to the user with number 65534")
    os.chown(folder, 0, 0)
    folder.rename(elsewhere := folder.with_name("elsewhere"))
    folder.symlink_to(elsewhere)
    forget()
    assert compiler.compile(SOURCE).origin == "disk", "a link of our own"
    os.chown(folder, 65534, 65534, follow_symlinks=False)
    assert "belongs to the user with number 65534" in refusal()


def test_folder_above_may_be_anybodys(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("RAWATTN_CACHE", str(folder / "mine"))
    assert [compiler.compile(SOURCE).origin, *(forget() or compiler.compile(SOURCE).origin for _ in "1")] == ["compiled", "disk"]


def test_recompile(folder: pathlib.Path) -> None:
    """A binary that the driver refused is in neither cache afterwards."""
    whole = compiler.compile(SOURCE)
    bad = dataclasses.replace(whole, cubin=bytes(len(whole.cubin)))
    compiler._store(folder, SOURCE, bad)
    forget()
    assert compiler.compile(SOURCE).cubin == bad.cubin and compiler.compile(SOURCE).origin == "memory"
    again = compiler.recompile(SOURCE)
    assert (again.origin, again.cubin) == ("compiled", whole.cubin)
    assert compiler.compile(SOURCE) == dataclasses.replace(again, origin="memory")
    forget()
    assert compiler.compile(SOURCE) == dataclasses.replace(again, origin="disk")


def test_recompile_where_there_is_no_nvrtc(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(SOURCE)
    monkeypatch.setattr(compiler, "_nvrtc", missing)
    with pytest.raises(UnsupportedError):
        compiler.recompile(SOURCE)
    assert not entries(folder) and SOURCE.key not in compiler._memory, "nobody is given it again"
    with pytest.raises(UnsupportedError):
        compiler.compile(SOURCE)


def missing() -> None:
    raise UnsupportedError("no NVRTC")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it is forbidden")
def test_read_only_folder(folder: pathlib.Path) -> None:
    folder.mkdir(mode=0o500)
    expect_memory_only()


def test_full_disk(folder: pathlib.Path) -> None:
    """No file of this process may pass 4096 bytes: the system stops the write in the middle, as a full disk does."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        expect_memory_only()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not entries(folder) and not list(folder.glob("*.tmp"))


def test_copied_cache_needs_no_nvrtc(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    size = len(compiler.compile(SOURCE).cubin)
    shutil.copytree(folder, tmp_path / "elsewhere")
    without = "sys.modules['cupy'] = None"
    assert answer(process(SOURCE, without, RAWATTN_CACHE=str(tmp_path / "elsewhere"))) == ["disk", str(size), "True"]
    missing = process(SOURCE, without, RAWATTN_CACHE=str(tmp_path / "nowhere"))
    _, error = missing.communicate("\n", timeout=100)
    assert missing.returncode == 1
    assert "UnsupportedError" in error and errors.INSTALL_EITHER in error


def test_missing_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nvrtc

    def absent() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nand more')

    monkeypatch.setattr(nvrtc, "getVersion", absent)
    with pytest.raises(UnsupportedError, match=r"libnvrtc\.so\.13.*pip install .cuda-bindings"):
        compiler.compile(SOURCE)


def incomplete(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[tuple[str, ...]]:
    """NVRTC without its builtins for so many compilations; what it is asked for with which options."""
    from cupy.cuda import nvrtc

    said, real, asked = "nvrtc: error: failed to open libnvrtc-builtins.so.13.0.\n  Make sure that", nvrtc.compileProgram, []

    def compile_program(program: Any, options: tuple[str, ...]) -> None:
        asked.append(tuple(options))
        if len(asked) <= failures:
            raise nvrtc.NVRTCError(7)
        real(program, options)

    monkeypatch.setattr(nvrtc, "compileProgram", compile_program)
    monkeypatch.setattr(nvrtc, "getProgramLog", lambda program, log=nvrtc.getProgramLog: log(program) or said)
    monkeypatch.setattr(compiler.time, "sleep", lambda seconds: None)
    return asked


def test_a_library_that_cannot_be_opened(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once is tried again; twice is named in words, and it is no fault of the source, which is not kept."""
    asked = incomplete(monkeypatch, 1)
    assert compiler.compile(SOURCE).cubin[1:4] == b"ELF" and len(asked) == 2
    monkeypatch.undo()
    asked, other = incomplete(monkeypatch, 9), dataclasses.replace(SOURCE, name="other.cu")
    with pytest.raises(
        CompileError, match=r"other.cu for sm_90a: .* could not open libnvrtc-builtins\.so\.13\.0,.*pip install"
    ) as caught:
        compiler._run_nvrtc(other)
    assert len(asked) == 2 and caught.value.source is None and not (folder / "failed").exists()


def test_threads_load_nvrtc_one_by_one() -> None:
    """Before NVRTC is loaded. That of 13.0 does not find its builtins by itself, and a thread that sees it loaded goes ahead."""
    sources = "[c.Source(f'{i}.cu', f'__global__ void f{i}() {{}}', (), 'sm_90a') for i in range(8)]"
    run = f"import sys, rawattn.compile.compiler as c; sys.setswitchinterval(1e-6); c.time.sleep = None; c.compile_all({sources})"
    subprocess.run([sys.executable, "-c", run], check=True, timeout=100)


def test_options_of_an_old_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """12.8 refuses --no-cache, and has no cache."""
    from cupy.cuda import nvrtc

    for version in ((12, 8), (12, 9)):
        with monkeypatch.context() as patch:
            asked = incomplete(patch, 2)
            patch.setattr(nvrtc, "getVersion", lambda version=version: version)
            with pytest.raises(CompileError):
                compiler._run_nvrtc(SOURCE)
        wanted = [each for each in SOURCE.options if version == (12, 9) or each != "--no-cache"]
        assert asked == [tuple(wanted)] * 2


@pytest.mark.parametrize(
    "arch, before, since", [("sm_103", (12, 8), "12.9"), ("sm_110", (12, 9), "13.0"), ("sm_121", (12, 8), "12.9")]
)
def test_an_nvrtc_that_is_older_than_the_gpu(
    arch: str, before: tuple[int, int], since: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not asked, and the error says which one is needed."""
    from cupy.cuda import nvrtc

    source, asked = dataclasses.replace(SOURCE, arch=arch), incomplete(monkeypatch, 2)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: before)
    words = rf"{SOURCE.name} for {arch} needs NVRTC {since} or later, and this is {before[0]}\.{before[1]}; pip install .*nvrtc=="
    with pytest.raises(UnsupportedError, match=words):
        compiler.compile(source)
    assert not asked
    monkeypatch.setattr(nvrtc, "getVersion", lambda: tuple(map(int, since.split("."))))
    with pytest.raises(CompileError):
        compiler.compile(source)
    assert asked


def test_clear_removes_only_our_files(folder: pathlib.Path) -> None:
    kernel_bytes = len(compiler.compile(SOURCE).cubin)
    with pytest.raises(CompileError):
        compiler.compile(BROKEN)
    ours = ["numba/rawattn_1/cpu.loop-1.py311.nbi", "numba/rawattn_1/cpu.loop-1.py311.1.nbc"]
    foreign = ["mine.cubin", "uv.lock", "ab.lock", "kernel.cu", "failed/mine.cu", "numba/mine.py", "photos/failed/a.nbi"]
    for name in ours + foreign:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    count, size = compiler.clear()
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()) == sorted(foreign)
    assert count == 1 + 4 + len(ours)  # the kernel; a source, two headers and a log; Numba's
    assert size > kernel_bytes
    assert not (folder / "numba" / "rawattn_1").exists()
    assert compiler.clear() == (0, 0)
    assert compiler.compile(SOURCE).origin == "compiled"


def test_clear_without_a_folder(folder: pathlib.Path) -> None:
    assert compiler.clear() == (0, 0)
    folder.write_text("not a folder")
    assert compiler.clear() == (0, 0)
    assert folder.exists()


def test_compile_error_shows_what_nvrtc_saw(folder: pathlib.Path) -> None:
    with pytest.raises(CompileError) as caught:
        compiler.compile(BROKEN)
    error = caught.value
    assert isinstance(error, RawattnError) and isinstance(error, RuntimeError)
    assert 'kernel.cu(5): error: identifier "missing" is undefined' in str(error)
    assert "not yet" in error.log and "1 error detected" in error.log
    assert error.source is not None and error.source in str(error)
    kept = pathlib.Path(error.source)
    assert kept == folder / "failed" / BROKEN.key
    assert {path: (kept / path).read_text() for path, _ in BROKEN.headers} == dict(BROKEN.headers)
    assert (kept / "kernel.cu").read_text() == BROKEN.text
    assert "--gpu-architecture=sm_90a" in (kept / "nvrtc.log").read_text() and error.log in (kept / "nvrtc.log").read_text()
    assert not entries(folder)


def test_compile_error_where_nothing_can_be_kept(folder: pathlib.Path) -> None:
    folder.write_text("not a folder")
    with pytest.warns(cache.CacheWarning), pytest.raises(CompileError, match="missing") as caught:
        compiler.compile(BROKEN)
    assert caught.value.source is None and "1 error detected" in caught.value.log


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arch": "sm_1"}, "invalid value for --gpu-architecture"),
        ({"arch": "sm_90", "text": '__global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }'}, "wgmma.fence"),
        ({"text": '#include "none.cuh"\n'}, "none.cuh"),
    ],
    ids=["architecture", "instruction", "header"],
)
def test_compile_error_has_the_first_error(changed: dict[str, str], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compiler.compile(dataclasses.replace(SOURCE, **changed))


def test_log_is_read() -> None:
    log = """\
ptxas info    : (C7517) wgmma.wait_group is injected in around line 35 by compiler in function 'k'
ptxas info    : (C7517) wgmma.wait_group is injected in around line 40 by compiler in function 'k'
ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized in the function 'k' in line 43
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Compiling entry function 'l' for 'sm_90a'
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""
    binary = compiler.Binary(b"", log, "13.5", 0.0, "compiled", "")
    assert (binary.registers, binary.spill_bytes, binary.advisories) == (168, 24, ("C7511", "C7517"))


def test_spills_and_registers_of_a_real_kernel() -> None:
    small = compiler.compile(SOURCE)
    assert 0 < small.registers < 64 and small.spill_bytes == 0 and small.advisories == ()
    text = """\
extern "C" __global__ __launch_bounds__(1024, 2) void kernel(float* x) {
    float a[128];
    for (int i = 0; i < 128; i++) a[i] = x[i * 1024 + threadIdx.x];
    for (int n = 0; n < 9; n++)
        for (int i = 0; i < 128; i++) a[i] = a[i] * a[(i + 1) % 128] + a[(i + 64) % 128];
    for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = a[i];
}
"""
    crowded = compiler.compile(compiler.Source("crowded.cu", text, (), "sm_90a"))
    assert crowded.registers <= 32 and crowded.spill_bytes > 0


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("RAWATTN_CACHE", "~/kernels")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "kernels"
    monkeypatch.setenv("RAWATTN_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "rawattn"
    assert not (tmp_path / "xdg").exists()
