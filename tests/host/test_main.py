"""The command line where there is no GPU, or where one is stood in for."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import pathlib
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rawattn import __main__ as command_line
from rawattn import errors
from rawattn.api import attention
from rawattn.command import demo, doctor
from rawattn.compile import cache as cache_module
from rawattn.compile import compiler
from rawattn.driver import context, device
from rawattn.driver.device import TYPICAL, Device

main = command_line.main
SMALL = ["--head-dim", "64", "--length", "128"]
RTX4090 = Device("NVIDIA GeForce RTX 4090", "sm_89", 128, 101_376, 72 << 20)
GTX1080 = Device("NVIDIA GeForce GTX 1080", "sm_61", 20, 49_152, 2 << 20)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty cache, in memory and on disk, for GPU kernels alone: the loops of the CPU are compiled once."""
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "cache"))
    compiler._memory.clear()
    return tmp_path / "cache"


def entries(cache: pathlib.Path) -> list[str]:
    return sorted(path.name for path in cache.glob("*.cubin"))


def no_driver() -> None:
    raise errors.UnsupportedError("there is no NVIDIA driver (libcuda.so.1); install one, or use arrays on the CPU.")


def no_nvrtc() -> None:
    raise errors.UnsupportedError(f"compiling a kernel needs CuPy and NVRTC (No module named 'cupy'); {errors.INSTALL_EITHER}")


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if they were not installed."""
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


# ---- the parser ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["demo", "doctor", "show", "choose", "compile", "bundle", "bench", "clear"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["dance"], "invalid choice: 'dance'"),
        (["compile", "--arch", "sm_10"], "invalid choice: 'sm_10' (choose from cpu, sm_75, sm_80"),
        (["choose", "--arch", "voodoo"], "4080, 4090, l40s, h200, h100, h100pcie, h20, b200, b300, thor, 5090"),
        (["compile", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["compile", "--window", "128"], "'128' is not a pair such as 128,0 or none,0"),
        (["compile", "--head-dim", "big"], "'big' is not an int from 1 up"),
        (["bench", "--lengths", "512,0"], "'512,0' is not a list such as 512,4096"),
        (["bench", "--tokens", "0"], "'0' is not an int from 1 up"),
        (["bench", "--seconds=-1"], "'-1' is not a number of seconds from 0 up"),
        (["bench", "--seconds", "nan"], "'nan' is not a number of seconds from 0 up"),
        (["choose", "--mask", "rawattn.mask:Chunked(64)"], "is no mask and no score of CUDA, such as rawattn.mask:Window(3);"),
        (["choose", "--mask", "rawattn.mask:Neighbourhood(12, 3)"], "shape is 12; it must be a tuple of ints >= 1"),
        (["clear", "--unused", "30"], "'30' is not a number of days or hours such as 30d or 12h"),
    ],
)
def test_arguments_that_cannot_be_read(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--softcap", "-1"], "softcap is -1.0; it must be a finite number > 0"),
        (["--window=-2,0"], "window left is -2; it must be >= 0"),
        (["--heads", "3", "--kv-heads", "2"], "q has 3 heads but k has 2"),
        (["--head-dim", "600"], "attn_fwd: head_dim is 600; it takes multiples of 8 from 8 to 256"),
        (["--head-dim-v", "600", "--dtype", "fp32"], "attn_fwd_simt: head_dim_v is 600; it takes up to 512"),
    ],
)
@pytest.mark.parametrize("command", ["choose", "show", "compile"])
def test_problems_that_are_refused(command: str, arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--arch", "sm_90a", *arguments]) == 1
    assert reason in capsys.readouterr().err


def test_options_describe_a_problem() -> None:
    text = (  # every option
        "choose --dtype fp16 --batch 3 --length 10 --kv-length 20 --heads 8 --kv-heads 2 --head-dim 64 --head-dim-v 32 --causal "
        "--window none,5 --softcap 30 --varlen --lse"
    )
    op = command_line._make_operation(command_line._make_parser().parse_args(text.split()))
    assert str(op) == (
        "Forward fp16 batch 3, length 10x20, varlen, 30 and 60 rows, heads 8/2, head_dim 64/32, "
        "And(a=Causal(align='bottom_right'), b=Window(left=None, right=5, align='bottom_right')), Softcap(cap=30.0), return_lse"
    )


def test_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def target(arch: str | None) -> Device:
        return command_line._choose_device(argparse.Namespace(arch=arch))

    monkeypatch.setattr(context, "device_count", lambda: 0)
    assert target(None) is target("sm_90a") is TYPICAL["sm_90a"]
    assert target("cpu").is_cpu
    monkeypatch.setattr(context, "device_count", lambda: 1)
    monkeypatch.setattr(context, "device", lambda index: RTX4090)
    assert target(None) is RTX4090 and target("sm_90a") is TYPICAL["sm_90a"]


@pytest.mark.parametrize(
    "arch, name",
    [
        ("SM_90A", "H200 (typical)"), ("h200", "H200 (typical)"), ("H100", "NVIDIA H100 80GB HBM3"), ("4090", "NVIDIA RTX 4090"),
        ("rtx 4090", "NVIDIA RTX 4090"), ("NVIDIA GeForce RTX 3090", "NVIDIA RTX 3090"), ("a100", "A100 (typical)"),
        ("a10g", "A10 (typical)"), ("L40S", "NVIDIA L40S"), ("t4", "T4 (typical)"), ("5090", "RTX 5090 (typical)"),
        ("b200", "B200 (typical)"), ("GB300", "B300 (typical)"), ("gb10", "GB10 (typical)"), ("spark", "GB10 (typical)"),
        ("DGX Spark", "GB10 (typical)"), ("thor", "AGX Thor (typical)"), ("Jetson AGX Orin", "AGX Orin (typical)"),
    ],
)  # fmt: skip
def test_boards_by_name(arch: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "--arch", arch]) == 0
    assert f"device   {name}\n" in capsys.readouterr().out


def test_every_board_has_one_name() -> None:
    assert len({*device.NAMES}) == sum(len(device.boards(arch)) for arch in TYPICAL) + len(device._LIKE), "two have the same"
    assert not {*device.NAMES} & {*TYPICAL, "cpu", ""}


def test_a_board_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is of one board; an architecture is whatever of it is here."""
    monkeypatch.setattr(context, "device_count", lambda: 1)
    monkeypatch.setattr(context, "device", lambda index: RTX4090)
    assert command_line._choose_device(argparse.Namespace(arch="sm_89")) is RTX4090
    assert command_line._choose_device(argparse.Namespace(arch="l4")) is TYPICAL["sm_89"]


@pytest.mark.parametrize("command", [["choose"], ["show", *SMALL]])
def test_the_default_is_said(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = "for H200 (typical), the default for want of a GPU here; --arch names another\n"
    monkeypatch.setattr(context, "device_count", lambda: 0)
    assert main(command) == 0 and said in capsys.readouterr().out
    assert main([*command, "--arch", "h200"]) == 0 and said not in capsys.readouterr().out


# ---- choose and show -----------------------------------------------------------------------------------------------------


def test_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "--arch", "sm_90a", "--causal"]) == 0
    out = capsys.readouterr().out
    for line in (
        "op       Forward bf16 batch 2, length 4096, heads 16, head_dim 128, Causal",
        "kernel   attn_fwd",
        "config   AttnFwdConfig(tile_q=",
    ):
        assert line in out
    configs = re.findall(r"Config\(.*?\)", out)
    times = [int(found.replace(",", "")) for found in re.findall(r"^  AttnFwdConfig\(.*\), ([\d,]+) us$", out, re.MULTILINE)]
    assert len(set(configs[1:])) == len(times) == command_line.COMPARED, "a record may choose what the cost model does not"
    assert sorted(times) == times


def test_choose_for_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choose", "--arch", "cpu", "--dtype", "fp64"]) == 0
    assert "kernel   cpu\n  not attn_fwd: it needs a Hopper GPU" in capsys.readouterr().out


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--arch", "sm_90a", *SMALL, "--softcap", "30"]) == 0
    out = capsys.readouterr().out
    assert "namespace cfg {" in out and "constexpr int head_dim = 64;" in out and "using Score = QuinticSoftcap;" in out
    assert "struct Args {" in out and "--gpu-architecture=sm_90a" in out
    assert re.search(r"^ +\d+ lines  attn_fwd\.cu$", out, re.MULTILINE) and "struct Softcap" not in out
    assert re.search(r"^compiled in [\d.]+ s by NVRTC [\d.]+; \d+ registers, \d+ bytes spilled$", out, re.MULTILINE)
    counts = {name: int(count) for count, name in re.findall(r"^ *(\d+) ([A-Z][A-Z0-9.]+) ", out, re.MULTILINE)}
    assert set(counts) <= set(command_line.INSTRUCTIONS) and "LDGSTS" not in counts
    assert counts["HGMMA"] and counts["UTMALDG"] and counts["MUFU.EX2"]


def test_show_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--arch", "sm_90a", *SMALL, "--softcap", "30", "--all"]) == 0
    out = capsys.readouterr().out
    assert "struct Softcap" in out and 'extern "C" __global__' in out


def test_show_without_nvdisasm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.metadata.files", lambda name: None)
    assert main(["show", "--arch", "sm_90a", *SMALL]) == 0
    assert "pip install nvidia-cuda-nvdisasm" in capsys.readouterr().out


def test_show_for_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--arch", "cpu"]) == 1
    assert "rawattn/cpu/lanes.py" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough() -> None:
    line = f"'{sys.executable}' -m rawattn show --arch sm_90a --all --head-dim 64 | head -n 1"
    ran = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert (ran.stdout.count("\n"), ran.stderr) == (1, "")


# ---- compile and clear ---------------------------------------------------------------------------------------------------


def test_compile_fills_the_cache(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", "--arch", "sm_90a", "--dtype", "bf16", *SMALL, "--causal", "--window", "128,0"]
    assert main(command) == 0
    first, kept = capsys.readouterr().out, entries(cache)
    assert re.search(r"^compiled in [\d.]+ s by NVRTC", first, re.MULTILINE) and f"kept in {cache}" in first
    named = re.findall(r"^(?:with )?(attn_fwd-\w{12})  AttnFwdConfig", first, re.MULTILINE)
    assert sorted(named) == [entry[: len("attn_fwd-") + 12] for entry in kept] and len(kept) > 1, "what other sizes get, too"
    compiler._memory.clear()
    assert main(command) == 0
    assert "compiled earlier, in" in (second := capsys.readouterr().out) and "now found on disk" in second
    assert entries(cache) == kept


def test_compile_of_another_kind_is_another_kernel(cache: pathlib.Path) -> None:
    def compiled(*options: str) -> list[str]:
        assert main(["compile", "--arch", "sm_90a", *SMALL, *options]) == 0
        return entries(cache)

    first = compiled()
    for options in (["--length", "15000"], ["--batch", "30", "--heads", "8", "--kv-heads", "4"]):
        assert compiled(*options) == first, "a length, a batch or a number of heads is not another kind"
    assert len(compiled("--lse")) == 2 * len(first)


def test_compile_into_a_folder(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compile", "--arch", "sm_90a", *SMALL, "--out", str(tmp_path / "out")]
    assert main(command) == 0
    (folder,) = (tmp_path / "out").iterdir()
    (binary,) = (each for each in compiler._memory.values() if folder.name == f"attn_fwd-{each.key[:12]}")
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert files.pop("attn_fwd.cubin") == binary.cubin and binary.cubin[:4] == b"\x7fELF"
    log = files.pop("nvrtc.log").decode()
    assert log.startswith("--gpu-architecture=sm_90a") and "Used" in log
    texts = {path: data.decode() for path, data in files.items()}
    source = compiler.Source("attn_fwd.cu", texts.pop("attn_fwd.cu"), tuple(sorted(texts.items())), "sm_90a")
    assert source.key == binary.key, "the folder has all that NVRTC was given"

    capsys.readouterr()
    compiler.clear()
    assert main(command) == 0, "compiled again, nothing differs"
    assert "overwriting" not in capsys.readouterr().out
    mine = folder / "config.cuh"
    mine.write_text("mine")
    assert main(command) == 1
    assert f"{mine} exists with other content" in (message := capsys.readouterr().err) and "--force" in message
    assert mine.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert f"overwriting {mine}" in capsys.readouterr().out and mine.read_text() != "mine"


def test_compile_into_a_folder_that_is_a_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("mine")
    assert main(["compile", "--arch", "sm_90a", *SMALL, "--out", str(tmp_path / "out")]) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_compile_with_a_cache_that_cannot_be_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "file" / "cache"))
    cache_module.warned.clear()
    assert main(["compile", "--arch", "sm_90a", *SMALL]) == 1
    assert "the cache folder cannot be used" in capsys.readouterr().err


def test_compile_without_nvrtc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compiler, "_nvrtc", no_nvrtc)
    assert main(["compile", "--arch", "sm_90a", *SMALL]) == 1
    assert errors.INSTALL[13] in capsys.readouterr().err


def test_clear(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_90a", *SMALL]) == 0
    (cache / "mine.txt").write_text("mine")
    count = len(entries(cache))
    capsys.readouterr()
    assert main(["clear"]) == 0
    assert re.search(rf"^removed {count} files, \d\.\d MB, from {re.escape(str(cache))}$", capsys.readouterr().out.strip())
    assert [path.name for path in cache.iterdir()] == ["mine.txt"]


def test_clear_what_is_unused(cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--arch", "sm_90a", *SMALL]) == 0
    old, *others = entries(cache)
    os.utime(cache / old, (0, time.time() - 30 * 86400))
    capsys.readouterr()
    assert main(["clear", "--unused", "31d"]) == 0 and "removed 0 files, 0.0 MB" in capsys.readouterr().out
    assert main(["clear", "--unused", "719h"]) == 0 and "removed 1 files, 0." in capsys.readouterr().out
    assert entries(cache) == others and others


# ---- doctor --------------------------------------------------------------------------------------------------------------


def examine(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, tuple[str, str]]]:
    """The exit status, and (mark, text) of each subject."""
    status = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    found = re.findall(r"^(ok|fix|note) +(GPU \d|\S+) +(.*)$", "\n".join(lines), re.MULTILINE)
    assert len(found) == len(lines)
    return status, {subject: (mark, text) for mark, subject, text in found}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Stands in for a driver and its GPUs."""

    def install(cuda: tuple[int, int] = (13, 0), *devices: Device) -> None:
        monkeypatch.setattr(context, "version", lambda: cuda)
        monkeypatch.setattr(context, "library", lambda: None)
        monkeypatch.setattr(context, "device_count", lambda: len(devices))
        monkeypatch.setattr(context, "device", lambda index: devices[index])

    return install


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "library", no_driver)


def test_doctor_without_a_gpu(no_gpu: None, cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = examine(capsys)
    assert status == 0
    assert list(found) == ["Python", "NumPy", "Numba", "torch", "Bindings", "CuPy", "NVRTC", "GPU", "Cache"]
    newer = {subject for subject, (mark, text) in found.items() if mark == "note" and "newer than tested" in text}
    assert {subject for subject, (mark, _) in found.items() if mark == "note"} - newer == {"GPU"}
    assert {mark for mark, _ in found.values()} == {"ok", "note"}
    assert found["GPU"][1].startswith("none in use (there is no NVIDIA driver")
    assert found["Cache"][1] == f"{cache}, 0 GPU kernels, 0.0 MB"


@pytest.mark.parametrize("version, mark", [("2.15.0+cu132", "ok"), ("2.16.0", "note"), ("3.0", "note")])
def test_doctor_says_what_was_tested(
    version: str, mark: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pytest.importorskip("torch"), "__version__", version)
    monkeypatch.setitem(doctor.TESTED, "torch", (2, 15))
    text = {"ok": "tested up to 2.15", "note": "newer than tested, which is up to 2.15"}[mark]
    found = examine(capsys)[1]["torch"]
    assert found[0] == mark and found[1].startswith(version) and text in found[1]


def test_what_doctor_says_to_install_is_what_the_extras_bring() -> None:
    """The ranges of pyproject.toml, in the words that pip takes on one line."""
    for major, line in errors.INSTALL.items():
        extra = re.search(
            rf"^cuda{major} = \[(.*)\]$",
            (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(),
            re.MULTILINE,
        )
        assert extra is not None
        for package in re.findall(r'"([^"]*)"', extra[1]):
            name, least, below = re.fullmatch(r"([\w-]+)>=([\d.]+),<(\d+)", package).groups()  # type: ignore[union-attr]
            assert f'"{name}=={least}.*"' in line or f'"{name}>={least}"' in line, "the lower bound"
            assert int(below) == int(least.partition(".")[0]) + 1, "== has the upper bound too"


def test_doctor_counts_the_cache(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    main(["compile", "--arch", "sm_90a", *SMALL])
    capsys.readouterr()
    assert re.search(rf", {len(entries(cache_module.cache_folder()))} GPU kernels, 0\.[1-9] MB$", examine(capsys)[1]["Cache"][1])


def test_doctor_without_a_gpu_and_cupy(no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "cupy", "cupy.cuda")
    status, found = examine(capsys)
    assert status == 0, "the CPU path needs no CuPy"
    for subject in ("CuPy", "NVRTC"):
        assert found[subject][0] == "note" and found[subject][1].endswith(f": to compile for a GPU, {errors.INSTALL_EITHER}")


def test_doctor_knows_a_torch_without_cuda(gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    gpu((13, 0), TYPICAL["sm_90a"])
    for cuda, mark in ((None, "note"), ("13.0", "ok")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert examine(capsys)[1]["torch"][0] == mark
    monkeypatch.setattr(torch, "__version__", "2.3.1")
    assert examine(capsys)[1]["torch"] == ("note", "2.3.1, but 2.4 is needed: pip install --upgrade 'torch>=2.4'")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert examine(capsys)[1]["torch"][0] == "ok"


def test_doctor_without_bindings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def version(name: str) -> str:
        raise doctor.importlib.metadata.PackageNotFoundError(name)

    context.library.cache_clear()
    without(monkeypatch, "cuda.bindings.driver")
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    status, found = examine(capsys)
    assert status == 0, "the CPU path needs none"
    assert found["Bindings"] == ("note", f"cuda-bindings is not installed: to use a GPU, {errors.INSTALL_EITHER}")
    assert "a GPU needs the package cuda-bindings" in found["GPU"][1]


def test_doctor_with_old_bindings(gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu((12, 8), TYPICAL["sm_90a"])
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "12.8.0")
    status, found = examine(capsys)
    assert (status, found["Bindings"]) == (1, ("fix", "12.8.0, but 12.9 is needed: " + errors.INSTALL[12]))


@pytest.mark.parametrize("cuda, major", [((13, 0), 13), ((12, 8), 12), ((12, 2), 12)])
def test_doctor_with_a_gpu_but_no_cupy(
    cuda: tuple[int, int], major: int, gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(cuda, TYPICAL["sm_90a"])
    without(monkeypatch, "cupy", "cupy.cuda")
    status, found = examine(capsys)
    assert status == 1
    for subject in ("CuPy", "NVRTC"):
        assert found[subject][0] == "fix" and found[subject][1].endswith(f": {errors.INSTALL[major]}")
    assert found["Driver"] == ("ok", f"for CUDA {cuda[0]}.{cuda[1]}")
    assert found["GPU 0"] == ("ok", "H200 (typical), sm_90a, served by attn_fwd")


@pytest.mark.parametrize("module, subject, line", [("numba", "Numba", "numba>=0.60"), ("numpy", "NumPy", "numpy>=2.0")])
def test_doctor_finds_an_old_or_broken_package(
    module: str, subject: str, line: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module] if module in sys.modules else pytest.importorskip(module), "__version__", "0.1.2")
        status, found = examine(capsys)
    assert (status, found[subject]) == (1, ("fix", f"0.1.2, but {line.split('>=')[1]} is needed: pip install --upgrade '{line}'"))
    without(monkeypatch, module)
    status, found = examine(capsys)
    assert status == 1
    assert found[subject][0] == "fix" and found[subject][1].endswith(f": pip install --upgrade '{line}'")


@pytest.mark.parametrize(
    "version, text, more",
    [
        ("12.4", "12.4, but 12.8 is needed", ""),
        ("13.5", "13.5, whose code a driver for CUDA 12.8 cannot load", ", or a newer NVIDIA driver"),
    ],
)
def test_doctor_looks_at_nvrtc(
    version: str, text: str, more: str, gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu((12, 8), TYPICAL["sm_90a"])
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: version)
    status, found = examine(capsys)
    assert (status, found["NVRTC"]) == (1, ("fix", f"{text}: {errors.INSTALL[12]}{more}"))


def test_doctor_finds_two_cupys(gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gpu((13, 0), TYPICAL["sm_90a"])
    with contextlib.suppress(ImportError):
        importlib.import_module("cupy")  # its first import reads the distributions too, and would break off half-way
    named = [argparse.Namespace(name=name) for name in ("cupy-cuda12x", "numpy", "cupy-cuda13x")]
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda: named)
    status, found = examine(capsys)
    fix = f"pip uninstall cupy-cuda12x cupy-cuda13x, then {errors.INSTALL[13]}"
    assert (status, found["CuPy"]) == (1, ("fix", f"cupy-cuda12x and cupy-cuda13x overwrite each other: {fix}"))


def test_doctor_with_a_gpu_that_has_no_kernel(gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu((13, 0), GTX1080, dataclasses.replace(TYPICAL["sm_90a"], index=1))
    status, found = examine(capsys)
    assert status == 0
    assert found["GPU 0"] == ("note", f"{GTX1080.name}, sm_61: no kernel serves it; arrays on the CPU work")
    assert found["GPU 1"][0] == "ok"


@pytest.mark.parametrize("cuda", [(11, 8), None])
def test_doctor_with_a_bad_driver(
    cuda: Any, gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise errors.DeviceError(
            "the NVIDIA driver cannot be used: cuInit failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803).", 803
        )

    gpu(cuda)
    if cuda is None:
        monkeypatch.setattr(context, "version", broken)
    status, found = examine(capsys)
    assert status == 1 and found["Driver"][0] == "fix" and "NVIDIA driver" in found["Driver"][1]


def test_doctor_with_a_cache_that_cannot_be_written(
    no_gpu: None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAWATTN_CACHE", str(tmp_path / "file" / "cache"))
    status, found = examine(capsys)
    assert status == 0 and found["Cache"][0] == "note"
    assert re.search(r"cannot be used \(.*Not a directory.*\): let RAWATTN_CACHE name a folder", found["Cache"][1])


# ---- demo ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, no_gpu: None) -> None:
    monkeypatch.setattr(demo, "CPU_SHAPE", (1, 64, 2, 16))
    monkeypatch.setattr(demo, "GPU_SHAPE", (1, 256, 2, 64))


def test_demo(small: None, cache: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["demo"]):
        compiler._memory.clear()
        assert main(arguments) == 0
        out = capsys.readouterr().out
        for pattern in (
            r"no GPU   there is no NVIDIA driver", r"kernel   cpu$", r"config   CpuConfig\(", r"  cheapest of",
            r"compiled .*Numba.*; ready after", r"error    \S+ relative to .*allowed  \(numpy\)$", r"time     .* TFLOP/s",
            r"kernel   attn_fwd$", r"compiled .*by NVRTC .*; \d+ registers, \d+ bytes spilled",
        ):  # fmt: skip
            assert re.search(f"^{pattern}", out, re.MULTILINE), pattern
    assert len(entries(cache)) == 1 and "compiled earlier" in out


@pytest.mark.parametrize("fault", ["off by 1 %", "one NaN"])
def test_demo_tells_of_a_wrong_result(
    fault: str, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = attention.attention

    def wrong(*inputs: Any, out: Any = None, **options: Any) -> Any:
        o = right(*inputs, out=out, **options)
        if fault == "one NaN":
            o[0, 1, 1, 1] = np.nan
        else:
            o[:, -1] *= 1.01
        return o

    monkeypatch.setattr(attention, "attention", wrong)
    assert main([]) == 1
    assert "the result is wrong" in capsys.readouterr().out


@pytest.mark.parametrize("installed", [True, False])
def test_demo_without_nvrtc(
    installed: bool, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left out on purpose it is no fault; beside an installed CuPy it is."""
    monkeypatch.setattr(compiler, "_nvrtc", no_nvrtc)
    if not installed:
        without(monkeypatch, "cupy")
    assert main([]) == int(installed)
    out = capsys.readouterr().out
    assert re.search(r"^error .*numpy", out, re.MULTILINE) and "no NVRTC compiling a kernel needs CuPy and NVRTC" in out
    assert errors.INSTALL_EITHER in out


def test_demo_without_torch(small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without(monkeypatch, "torch")
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "torch is not here to compare with" in out and "torch's speed" not in out


def test_demo_with_a_gpu_but_no_cupy(
    small: None, gpu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu((13, 0), TYPICAL["sm_90a"])
    without(monkeypatch, "cupy", "cupy.cuda")
    assert main([]) == 1
    assert f"no GPU   H200 (typical) needs CuPy and NVRTC; {errors.INSTALL_EITHER}" in capsys.readouterr().out


def test_demo_with_a_gpu_that_has_no_kernel(small: None, gpu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpu((13, 0), GTX1080)
    assert main([]) == 0
    assert "GTX 1080" in (out := capsys.readouterr().out) and "compute capability 7.5 or newer" in " ".join(out.split())


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("libraries", [["cupy"], ["cupy", "torch"]])
def test_demo_with_a_gpu(libraries: list[str], right: bool, small: None, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it is used, in the libraries that see it, and decides the exit status; what it computes is for a GPU to test."""
    gpu((13, 0), TYPICAL["sm_90a"])
    calls = []
    cuda = types.SimpleNamespace(is_available=lambda: "torch" in libraries)
    monkeypatch.setattr(demo, "import_if_there", lambda name: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(demo, "attend", lambda console, libraries, *rest: calls.append(libraries) or right)
    assert main([]) == int(not right)
    assert calls == [libraries]


def test_module_runs(tmp_path: pathlib.Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "rawattn", "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout.startswith("ok   Python   3.") and ran.returncode in (0, 1)
