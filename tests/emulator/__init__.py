"""Runs kernels of ``cuda_src/`` on the CPU, thread by thread: what they compute can be checked where there is no GPU.

The kernel's own text is compiled for the host, but for ``ptx/``, bf16 and fp16, whose instructions are written here in C++.
Threads of a block are coroutines that change at barriers, votes and exchanges. Matrix products, and copies by threads, are done
at once where they are issued; those of TMA come late, the last one first. What is computed is what a GPU computes, up to
rounding; most races are not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from rawattn.compile.compiler import Source
from rawattn.kernel import render
from rawattn.variant.field import Fields

HERE = pathlib.Path(__file__).parent
torn_after = -1  # reads of lengths after which these are others; -1: never
late_thread = -1  # which looks at an mbarrier only when nothing else can happen; -1: none
PTX = (
    "atomic", "barrier", "base", "bulk", "cluster", "cp_async", "cp_async_mbarrier", "elect", "fp16", "fp8", "ldmatrix", "load",
    "load_shared", "mbarrier", "mma", "movmatrix", "mma_tf32", "prefetch", "red", "stmatrix", "tma", "turn", "wgmma",
)  # fmt: skip
PRODUCT = re.compile(r"(struct (\w+) \{.*?sign = (-?1)\.f;.*?)asm volatile\(.*?, (\d); \}\"\n.*?\n    \}\n", re.DOTALL)


def library(source: Source, folder: pathlib.Path) -> ctypes.CDLL:
    """A kernel as a shared library in ``folder``: ``run(args, blocks, first, end)``."""
    text = re.sub(r"extern __shared__ __align__\(\d+\) unsigned char raw\[\];", "unsigned char* const raw = ::raw;", source.text)
    files = {**dict(source.headers), source.name: text}
    dims = re.search(r"__cluster_dims__\((.*?)\)", "".join(files.values()))
    files["config.cuh"] = PRODUCT.sub(_product, files["config.cuh"])
    if "tile/tile.cuh" in files:
        to = r"d = u64(\1) << 32 | low_word;"
        tile = files["tile/tile.cuh"].replace("address >> 4 |", "(address & address_bits) >> 4 |")  # without the rank
        files["tile/tile.cuh"] = re.sub(r'asm\("mov.b64.*?"r"\(low_word\), "r"\((.*?)\)\);', to, tile)
    together = dims[1] if dims else "facts.needs_all_blocks ? blocks : 1"
    entry = ENTRY.replace("KERNEL", pathlib.PurePath(source.name).stem).replace("TOGETHER", together)
    return compiled(f'#include "threads.hpp"\n#include "{source.name}"\n{entry}', files, folder)


def compiled(text: str, files: dict[str, str], folder: pathlib.Path) -> ctypes.CDLL:
    """``text``, which includes ``files`` of ``cuda_src/``, as a shared library. Skips where there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("needs a C++ compiler for the host: c++ or g++")
    files |= {f"ptx/{name}.cuh": '#pragma once\n#include "threads.hpp"\n' for name in PTX} | {"host.cpp": text}
    files |= {f"variant/element/{name}.cuh": (HERE / f"{name}.hpp").read_text() for name in ("bf16", "fp16")}
    files |= {path: (render.FOLDER / path).read_text() for path in ("variant/element/word_operands.cuh",)}
    for path, content in files.items():
        to = folder / path.replace("../", "up/")
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(content.replace('"../', '"up/'))
    flags = ("-std=c++20", "-Og", "-w", "-fno-strict-aliasing", "-fPIC", "-U_FORTIFY_SOURCE")  # it forbids jumps
    prelude = precompiled(compiler, flags, (HERE / "threads.hpp").read_text())
    return built([compiler, *flags, "-shared", "-I.", f"-I{prelude}", "-o", "host.so", "host.cpp"], folder, files)


def built(command: list[str], folder: pathlib.Path, files: Mapping[str, str]) -> ctypes.CDLL:
    """The ``host.so`` that a command makes of files in ``folder``, once in all processes of the tests."""
    key = hashlib.sha256(repr((command, sorted(files.items()))).encode()).hexdigest()
    kept = _shared() / f"{key}.so"
    if not kept.exists():
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[:4000]
        with tempfile.NamedTemporaryFile(dir=_shared(), delete=False) as to:
            to.write((folder / "host.so").read_bytes())
        os.replace(to.name, kept)
    return ctypes.CDLL(str(kept))


@functools.cache
def precompiled(compiler: str, flags: tuple[str, ...], prelude: str) -> str:
    """A folder with the prelude and what the compiler made of it, which saves it a second in each kernel."""
    kept = _shared() / hashlib.sha256(repr((compiler, flags, prelude)).encode()).hexdigest()
    if not kept.exists():
        made = pathlib.Path(tempfile.mkdtemp(dir=_shared()))
        to = made / "threads.hpp"
        to.write_text(prelude)
        subprocess.run([compiler, *flags, "-x", "c++-header", str(to), "-o", f"{to}.gch"], check=True, capture_output=True)
        with contextlib.suppress(OSError):  # another process was first
            made.rename(kept)
    return str(kept)


@functools.cache
def _shared() -> pathlib.Path:
    """The folder of all processes of the tests (tests/conftest.py), or one of this process."""
    if "RAWATTN_TESTS_BUILT" in os.environ:
        return pathlib.Path(os.environ["RAWATTN_TESTS_BUILT"])
    _folders.append(tempfile.TemporaryDirectory(prefix="rawattn-built-", ignore_cleanup_errors=True))
    return pathlib.Path(_folders[0].name)


_folders: list[tempfile.TemporaryDirectory[str]] = []  # which go with the process
ENTRY = """
extern "C" int run(const Args* args, int blocks, int first, int end) {
    return emulate(blocks, first, end, facts.threads, facts.smem_bytes, facts.uses_pdl, [=] { KERNEL(*args); }, TOGETHER);
}
extern "C" void be_late(int thread) { late_thread = thread; }
extern "C" void tear(int after) { ptx::torn_after = after, ptx::reads = 0; }
extern "C" u32 args_bytes() { return sizeof(Args); }
"""


def _product(match: re.Match[str]) -> str:
    head, _, sign, by_rows = match.groups()
    widen = "ptx::widen_fp16" if ".f16.f16" in match[0] else "::wide"
    return f"{head}wgmma(d, a, b, add, {sign}, {by_rows}, {widen});\n    }}\n"


class Kernel:
    """A kernel on the CPU."""

    def __init__(self, source: Source, fields: Fields, folder: pathlib.Path, number: str = "fp32") -> None:
        self.fields, self.number = fields, number
        self._library = library(source, folder)

    def __call__(self, blocks: int, values: Mapping[str, Any], some: range | None = None) -> None:
        """Runs ``blocks`` blocks, or some of them. A value is a number, the bytes of a struct, or an array, whose pointer is
        given."""
        layout = render.layout(self.fields, self.number)
        found = (values[field.name] for field in self.fields)
        args = layout.pack.pack(*(value.ctypes.data if isinstance(value, np.ndarray) else value for value in found))
        self.launch(blocks, args, some)

    def launch(self, blocks: int, args: bytes, some: range | None = None) -> None:
        """Runs ``blocks`` blocks, or some of them, with these bytes of arguments."""
        size = len(args)
        assert size == self._library.args_bytes()
        memory = np.zeros(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        memory[start : start + size] = np.frombuffer(args, np.uint8)
        given = ctypes.c_void_p(memory.ctypes.data + start)
        self._library.be_late(late_thread)
        self._library.tear(torn_after)
        some = range(blocks) if some is None else some
        assert self._library.run(given, blocks, some.start, some.stop) == 0, "every thread waits"


def strided(x: npt.NDArray[Any]) -> bytes:
    """The StridedTensor of (batch, rows, heads, columns)."""
    return np.array([x.ctypes.data, *x.strides[:3]], np.int64).tobytes()


def tma(x: npt.NDArray[Any], box_rows: int) -> bytes:
    """The TmaTensor of (batch, rows, heads, columns), with a map as ``threads.hpp`` reads it."""
    batch, row, head, _ = x.strides
    words = [x.ctypes.data, row, head, batch, x.shape[3], x.shape[1], box_rows, *[0] * 9]
    return np.array(words, np.int64).tobytes() + np.array([1, 1], np.int32).tobytes() + bytes(56)


def bf16(rng: np.random.Generator, *shape: int) -> npt.NDArray[Any]:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
