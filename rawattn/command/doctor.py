"""This module is ``python -m rawattn doctor``: it says whether attention() has all it needs here, and what to do where not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console

from ..compile import compiler
from ..compile.cache import private_folder
from ..driver import context
from ..errors import INSTALL, INSTALL_EITHER, DeviceError, UnsupportedError
from ..operation import Forward
from ..runtime.select import select
from ..variant.element import BF16

Version = tuple[int, ...]
# Subject of a finding -> the newest version with which the tests passed.
TESTED: dict[str, Version] = {
    "NumPy": (2, 4), "Numba": (0, 68), "torch": (2, 15), "Bindings": (13, 5), "CuPy": (14, 2), "NVRTC": (13, 5)
}  # fmt: skip


class Finding(NamedTuple):
    """A line of the report."""

    subject: str
    state: str
    fix: str = ""  # what to do; empty where all is well
    broken: bool = False  # whether attention() fails on this machine until that is done


def run(console: Console) -> int:
    """Prints a line for each thing that is examined; gives 1 where one keeps attention() from running here, else 0."""
    with console.status("looking"):
        findings = [_compare_with_tested(finding) for finding in examine()]
    for subject, state, fix, broken in findings:
        mark, style = ("fix", "red") if broken else ("note", "yellow") if fix else ("ok", "green")
        console.print(f"{mark:<5}", style=style, end="")
        console.print(f"{subject:<8} {state}{f': {fix}' if fix else ''}")
    return int(any(finding.broken for finding in findings))


def examine() -> Iterator[Finding]:
    """Examines all that attention() needs, in order."""
    good = sys.version_info >= (3, 10)
    yield Finding("Python", platform.python_version(), "" if good else "install Python 3.10 or newer", not good)
    yield _examine_package("NumPy", "numpy", (2, 0))
    yield _examine_package("Numba", "numba", (0, 60))
    cuda, findings = _examine_driver()
    yield _examine_torch(cuda)
    yield _examine_bindings(cuda)
    yield _examine_cupy(cuda)
    yield _examine_nvrtc(cuda)
    yield from findings
    yield _examine_cache()


def _compare_with_tested(finding: Finding) -> Finding:
    """Adds the newest version that was tested, and makes a note of one that is newer."""
    newest = TESTED.get(finding.subject)
    if newest is None or finding.fix or not finding.state[:1].isdigit():
        return finding
    tested = ".".join(map(str, newest))
    if _read_numbers(finding.state) > newest:
        return finding._replace(
            fix=f"newer than tested, which is up to {tested}; if something fails, report it, or take {tested}"
        )
    return finding._replace(state=f"{finding.state}, tested up to {tested}")


def _read_numbers(text: str) -> Version:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def _shorten(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _examine_package(subject: str, module: str, least: Version, fix: str = "", needed: bool = True) -> Finding:
    """Examines a package, of which a version is the least that serves."""
    at_least = ".".join(map(str, least))
    fix = fix or f"pip install --upgrade '{module}>={at_least}'"
    try:
        version: str = importlib.import_module(module).__version__
    except Exception as error:  # a broken package raises anything
        return Finding(subject, _shorten(error), fix, needed)
    if _read_numbers(version) < least:
        return Finding(subject, f"{version}, but {at_least} is needed", fix, needed)
    return Finding(subject, version)


def _examine_torch(cuda: Version | None) -> Finding:
    """Examines torch, which other arrays do not need; a build for the CPU alone has no tensors on a GPU."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "not installed; arrays of CuPy, JAX and NumPy need none")
    finding = _examine_package("torch", "torch", (2, 4), needed=False)
    if finding.fix or cuda is None or importlib.import_module("torch").version.cuda:
        return finding
    return Finding("torch", f"{finding.state}, a build without CUDA", "install one with CUDA, for tensors on the GPU")


def _examine_bindings(cuda: Version | None) -> Finding:
    """Examines NVIDIA's bindings, without which nobody knows whether there is a GPU."""
    try:
        version = importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return Finding("Bindings", "cuda-bindings is not installed", f"to use a GPU, {INSTALL_EITHER}")
    if _read_numbers(version) < (12, 9):
        return Finding("Bindings", f"{version}, but 12.9 is needed", _write_pip_line(cuda), cuda is not None)
    return Finding("Bindings", version)


def _examine_cupy(cuda: Version | None) -> Finding:
    names = [d.name for d in importlib.metadata.distributions() if re.fullmatch(r"cupy(-cuda\d+x)?", d.name or "")]
    if len(names) > 1:
        fix = f"pip uninstall {' '.join(names)}, then {_write_pip_line(cuda)}"
        return Finding("CuPy", f"{' and '.join(names)} overwrite each other", fix, cuda is not None)
    return _examine_package("CuPy", "cupy", (14, 0), _write_pip_line(cuda), cuda is not None)


def _examine_nvrtc(cuda: Version | None) -> Finding:
    try:
        version = compiler.nvrtc_version()
    except UnsupportedError as error:
        return Finding("NVRTC", _shorten(error.__cause__ or error), _write_pip_line(cuda), cuda is not None)
    if _read_numbers(version) < (12, 8):
        return Finding("NVRTC", f"{version}, but 12.8 is needed", _write_pip_line(cuda), cuda is not None)
    if cuda is not None and _read_numbers(version)[0] > cuda[0]:
        state = f"{version}, whose code a driver for CUDA {cuda[0]}.{cuda[1]} cannot load"
        return Finding("NVRTC", state, f"{_write_pip_line(cuda)}, or a newer NVIDIA driver", True)
    return Finding("NVRTC", version)


def _write_pip_line(cuda: Version | None) -> str:
    """Writes the line that installs bindings, CuPy and NVRTC where the driver supports this CUDA version, None without a GPU."""
    if cuda is None:
        return f"to compile for a GPU, {INSTALL_EITHER}"
    return INSTALL[13 if cuda >= (13, 0) else 12]


def _examine_driver() -> tuple[Version | None, list[Finding]]:
    """Examines driver and GPUs. Returns the CUDA version that the driver supports, if there is a GPU, and the lines on them."""
    try:
        cuda = context.version()
        devices = [context.device(index) for index in range(context.device_count())]
    except UnsupportedError as error:
        return None, [Finding("GPU", f"none in use ({_shorten(error)})", "attention() runs on the CPU")]
    except DeviceError as error:
        return None, [Finding("Driver", _shorten(error), "reinstall the NVIDIA driver, or restart after its update", True)]
    old = cuda < (12, 0)
    findings = [Finding("Driver", f"for CUDA {cuda[0]}.{cuda[1]}", "install NVIDIA driver 580 or newer" if old else "", old)]
    for device in devices:
        state, fix = f"{device.name}, {device.arch}", ""
        try:
            kernel = select(Forward(BF16, 1, 4096, 4096, 16, 16, 128, 128), device).kernel
            state = f"{state}, served by {kernel.name}"
        except UnsupportedError:
            fix = "no kernel serves it; arrays on the CPU work"
        findings.append(Finding(f"GPU {device.index}", state, fix))
    return cuda, findings


def _examine_cache() -> Finding:
    try:
        folder = private_folder()
        sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
        with tempfile.TemporaryFile(dir=folder):
            return Finding("Cache", f"{folder}, {len(sizes)} GPU kernels, {sum(sizes) / 1e6:.1f} MB")
    except OSError as error:
        fix = "let RAWATTN_CACHE name a folder of yours that can be written; until then each process compiles its own"
        return Finding("Cache", f"cannot be used ({error})", fix)
