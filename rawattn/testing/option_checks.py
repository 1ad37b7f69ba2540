"""This module checks a mask or a score that is written in CUDA: ``rawattn.testing.check_option``.

The CUDA file is compiled for the CPU, as it is, behind a few lines that stand for a GPU's own. What it answers is compared with
the definition in Python, pair by pair. Kernels that have it in them are compiled by NVRTC, which needs no GPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import numpy as np
import numpy.typing as npt

from ..compile import compiler
from ..driver.device import TYPICAL
from ..errors import ProblemError, UnsupportedError
from ..kernel import render
from ..operation import Backward, Forward
from ..operation.spec import Spec
from ..runtime.select import select
from ..variant import Option
from ..variant.element import BF16
from ..variant.field import Field, Fields
from ..variant.mask import Mask, of_head
from ..variant.offset import OffsetMask
from ..variant.score import Score

Offsets = tuple[int, int] | None
Bools = npt.NDArray[np.bool_]
# In place of ptx/base.cuh: what one thread needs.
BASE = """\
#pragma once
#include <algorithm>
#include <cmath>
#include <strings.h>
#include <type_traits>
#define __device__
#define __noinline__
#define __forceinline__ inline
#define __fma_rn ::fma
#define __fmaf_rn ::fmaf
#define __fsqrt_rn ::sqrtf
#define __expf ::expf
#define __logf ::logf
#define __log2f ::log2f
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
constexpr float minus_inf = -__builtin_inff();
template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {  // of NaN and a number the number, as a GPU's
    const std::common_type_t<A, B> x = a, y = b;
    return x > y || y != y ? x : y;
}
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    const std::common_type_t<A, B> x = a, y = b;
    return x < y || y != y ? x : y;
}

inline i32 __ffs(i32 x) { return ffs(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline u32 __umulhi(u32 a, u32 b) { return u32(u64(a) * b >> 32); }
template <class T> T __ldg(const T* p) { return *p; }
namespace ptx {
inline float exp2(float x) { return ::exp2f(x); }
inline double exp2(double x) { return ::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline double reciprocal(double x) { return 1 / x; }
}
"""
LANES = """\
inline bool __any_sync(u32, bool vote) { return vote; }  // the thread is a warp of one lane
inline u32 __ballot_sync(u32, bool vote) { return vote; }
template <class T> T __shfl_sync(u32, T x, i32) { return x; }
template <class T> T __shfl_xor_sync(u32, T x, i32) { return x; }
namespace ptx { inline u32 uniform(u32 x) { return x; } }
"""
HEAD = """\
using Number = {number};
namespace cfg {{ extern "C" {{ i32 tile_q, tile_kv; {constants} }} }}
struct Args {{ {fields} }};
struct Rows {{
    i32 q_len, kv_len, has_offset, q_offset, kv_offset;
    i32 shift(i32 to_last) const {{ return has_offset ? q_offset - kv_offset : to_last * (kv_len - q_len); }}
}};
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"
{includes}
using O = {type};
template <class T> constexpr bool by_head = requires {{ requires T::of_head; }};
extern "C" {{ bool differs_by_head = by_head<O>; }}
"""
MASK = """\
extern "C" void keep(const Args* args, const Rows* rows, i32 head, i32 keys, bool* kept) {
    const O mask(*args, *rows, {0, head, 0, 0});
    for (i32 q = 0; q < rows->q_len; ++q)
        for (i32 first = 0; first < keys; first += cfg::tile_kv)
            for (i32 offset = 0; offset < cfg::tile_kv; ++offset) *kept++ = mask.row(q, first).keep(offset);
}
"""
TILES = """\
extern "C" void kv_tiles(const Args* args, const Rows* rows, i32 head, i32 q_begin, i32 q_end, TileRange* range) {
    *range = O(*args, *rows, {0, head, 0, 0}).kv_tiles(q_begin, q_end);
}
extern "C" void q_tiles(const Args* args, const Rows* rows, i32 head, i32 kv_begin, i32 kv_end, TileRange* range) {
    *range = O(*args, *rows, {0, head, 0, 0}).q_tiles(kv_begin, kv_end);
}
"""
BOXES = """\
extern "C" i32 classify(const Args* args, const Rows* rows, i32 head, i32 q, i32 q_last, i32 kv, i32 kv_last) {
    return O(*args, *rows, {0, head, 0, 0}).classify({q, q_last}, {head, head}, {kv, kv_last});
}
"""
SCORE = """\
extern "C" void ask(const Args* args, const Rows* rows, i32 head, const Number* s, Number* logit, Number* slope) {
    const O score(*args, *rows, {1, head, 0, 0});
    for (i32 q = 0; q < rows->q_len; ++q)
        for (i32 kv = 0; kv < rows->kv_len; ++kv, ++s) {
            *logit++ = score(*s, q, kv) * score.scale_log2 / Number(log2_e);
            *slope++ = score.derivative(*s, q, kv);
        }
}
"""


def library(text: str, folder: pathlib.Path, lanes: str = LANES) -> ctypes.CDLL:
    """Makes a shared library, in a folder, of a text that includes files of ``cuda_src/``. Raises UnsupportedError where there is
    no C++ compiler for the host, and ProblemError with what it said where it refused the text."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise UnsupportedError("a C++ compiler for the host is needed, which compiles CUDA files for the CPU: c++ or g++.")
    (folder / "ptx").mkdir()
    (folder / "ptx" / "base.cuh").write_text(BASE + lanes)
    (folder / "host.cpp").write_text('#include "ptx/base.cuh"\n' + text)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", "host.so", "host.cpp", "-I.", f"-I{render.FOLDER}"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if ran.returncode:
        raise ProblemError(f"{pathlib.Path(compiler).name} refused the CUDA file as C++ for the host:\n{ran.stderr[:4000]}")
    return ctypes.CDLL(str(folder / "host.so"))


@functools.lru_cache(maxsize=256)
def _compile(kind: tuple[Any, ...], fields: Fields, entries: str, number: str) -> ctypes.CDLL:
    """Compiles the type of an option. Its constants are variables, so that one library serves all values."""
    name, sources, constants = kind
    includes = "".join(f'#include "{source}"\n' for source in sources)
    text = HEAD.format(
        number=number, type=name, includes=includes, constants="".join(f"i32 {constant}; " for constant in constants),
        fields="".join(f"{field.ctype} {field.name}; " for field in fields),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="rawattn-option-") as folder:
        return library(text + entries, pathlib.Path(folder))


class OnHost:
    """An option's CUDA type for one sequence and head, on the CPU. ``offsets`` are the positions of the first query and key."""

    def __init__(
        self, option: Any, entries: str, lengths: tuple[int, int], tiles: tuple[int, int] = (64, 64), offsets: Offsets = None,
        head: int = 0, scale: float | None = None, number: str = "fp32",
    ) -> None:  # fmt: skip
        fields = (*((Field("scale", "Number"),) if scale is not None else ()), *option.fields)
        kind = option.cuda_type, option.sources, tuple(option.constants)
        self.library = _compile(kind, fields, entries, {"fp32": "float", "fp64": "double"}[number])
        for name, value in {**dict(zip(("tile_q", "tile_kv"), tiles, strict=True)), **option.constants}.items():
            ctypes.c_int.in_dll(self.library, name).value = value
        values = {"scale": scale, **option.values}
        args = render.layout(fields, number).pack.pack(*(values[field.name] for field in fields))
        rows = (*lengths, offsets is not None, *(offsets or (0, 0)))
        self.arguments = ctypes.create_string_buffer(args, max(1, len(args))), (ctypes.c_int * 5)(*rows), head

    def tiles(self, which: str, begin: int, end: int) -> list[int]:
        """Asks ``kv_tiles`` or ``q_tiles``: begin, full_begin, full_end, end."""
        ends = (ctypes.c_int * 4)()
        getattr(self.library, which)(*self.arguments, begin, end, ends)
        return list(ends)

    def keep(self, rows: int, keys: int) -> Bools:
        """Returns which of the queries keep which keys."""
        kept = np.zeros((rows, keys), bool)
        self.library.keep(*self.arguments, keys, kept.ctypes.data_as(ctypes.c_void_p))
        return kept


def _check_visits(ends: list[int], needed: Any, full: Any, exact: bool) -> tuple[int, int]:
    """Returns the tiles that ``ends`` visits. Raises AssertionError where it leaves out a tile that is ``needed``, takes one for
    full that is not, or, where it must be ``exact``, visits one in vain."""
    begin, full_begin, full_end, end = ends
    tile = np.arange(len(needed))
    is_visited, is_full = (tile >= begin) & (tile < end), (tile >= full_begin) & (tile < full_end)
    assert is_visited[needed].all(), "a kept pair lies in a tile that is not visited"
    assert begin >= end or (begin >= 0 and end <= len(tile)), "a tile that does not exist is visited"
    assert ((is_full & is_visited) == full).all(), "a tile is taken for full that is not, or the reverse"
    assert not exact or (is_visited == needed).all(), "a tile is visited in vain"
    return begin, end


def check_mask(
    mask: Any, q_len: int, kv_len: int, tile_q: int, strip: int, tile_kv: int, offsets: Offsets = None, head: int = 0
) -> None:
    """Checks all of a mask that a kernel relies on, for blocks of ``tile_q`` queries of which a warpgroup has ``strip``. Raises
    AssertionError where the CUDA file and ``interval`` differ."""
    on_host = OnHost(mask, MASK + TILES, (q_len, kv_len), (tile_q, tile_kv), offsets, head)
    begin, end = of_head(mask if offsets is None else OffsetMask(mask, *offsets), head).interval(np.arange(q_len), q_len, kv_len)
    tiles, q_tiles = -(-kv_len // tile_kv), -(-q_len // tile_q)
    keys = np.arange(tiles * tile_kv)
    kept = (keys >= begin[:, None]) & (keys < end[:, None])
    assert (on_host.keep(q_len, len(keys)) == kept).all(), "a query keeps other keys than interval says"
    exact = offsets is not None or len(set(mask.constants.values())) < 2  # with two alignments a block's hull may be wider

    def of_rows(first: int, count: int) -> tuple[int, int]:
        last = min(first + count, q_len)
        by_tile = kept[first:last].reshape(last - first, tiles, tile_kv)
        return _check_visits(on_host.tiles("kv_tiles", first, last), by_tile.any((0, 2)), by_tile.all((0, 2)), exact)

    for first in range(0, q_len, tile_q):
        block = of_rows(first, tile_q)
        for part in range(first, min(first + tile_q, q_len), strip):
            bounds = of_rows(part, strip)
            within = bounds[0] >= bounds[1] or (block[0] <= bounds[0] and bounds[1] <= block[1])
            assert within, "a warpgroup needs a tile that its block does not load"
    starts = np.arange(q_tiles) * tile_q
    for first in range(0, kv_len, tile_kv):
        for last in {first + tile_kv, min(first + tile_kv, kv_len)}:  # past the last key, which no query keeps, and not
            pairs = np.zeros((q_len, last - first), bool)
            pairs[:, : kv_len - first] = kept[:, first : min(last, kv_len)]
            needed = np.logical_or.reduceat(pairs.any(1), starts) if q_tiles else np.zeros(0, bool)
            full = np.logical_and.reduceat(pairs.all(1), starts) if q_tiles else needed
            _check_visits(on_host.tiles("q_tiles", first, last), needed, full, exact)


def check_inverse(mask: Any, q_len: int, kv_len: int, tile_q: int, tile_kv: int, offsets: Offsets = None, head: int = 0) -> None:
    """Checks that ``kv_tiles`` and ``q_tiles`` of a mask visit the same pairs of tiles, or blocks that add to dq in turn would
    wait for ever."""
    on_host = OnHost(mask, MASK + TILES, (q_len, kv_len), (tile_q, tile_kv), offsets, head)
    q_tiles, kv_tiles = -(-q_len // tile_q), -(-kv_len // tile_kv)
    visits, inverse = np.zeros((2, q_tiles, kv_tiles), bool)
    for t in range(q_tiles):
        first, _, _, last = on_host.tiles("kv_tiles", t * tile_q, min((t + 1) * tile_q, q_len))
        visits[t, first:last] = True
    for n in range(kv_tiles):
        first, _, _, last = on_host.tiles("q_tiles", n * tile_kv, min((n + 1) * tile_kv, kv_len))
        inverse[max(first, 0) : last, n] = True
    assert (visits == inverse).all(), "a tile is visited from one side only"


def check_boxes(mask: Any, q_len: int, kv_len: int, tile_q: int, tile_kv: int, head: int = 0) -> None:
    """Checks a mask whose tiles are a list: ``keep`` is its definition, and ``classify`` is asked for each tile."""
    on_host = OnHost(mask, MASK + BOXES, (q_len, kv_len), (tile_q, tile_kv), None, head)
    q, kv = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    wanted = np.broadcast_to(mask.keep(np, 0, head, q, kv, q_len, kv_len), (q_len, kv_len))
    kept = on_host.keep(q_len, -(-kv_len // tile_kv) * tile_kv)
    assert (kept[:, :kv_len] == wanted).all() and not kept[:, kv_len:].any(), "a query keeps other keys than keep says"
    for row in range(0, q_len, tile_q):
        for column in range(0, kv_len, tile_kv):
            box = wanted[row : row + tile_q, column : column + tile_kv]
            last = min(row + tile_q, q_len) - 1, min(column + tile_kv, kv_len) - 1
            classes = on_host.library.classify(*on_host.arguments, row, last[0], column, last[1])
            assert classes in ((0, 1), (1,), (1, 2))[1 + int(box.all()) - int(not box.any())], (
                "a box of pairs is of another class"
            )


def check_score(score: Any, number: str = "fp32", head: int = 0, scale: float = 1.0) -> None:
    """Checks a score's logits of dot products of every size, and their derivatives. Raises AssertionError where the CUDA file
    differs from ``logit`` and ``slope``. The sign of the scale is in the dot products."""
    dtype, allowed = (np.float32, 2e-6) if number == "fp32" else (np.float64, 1e-13)
    n, m = 7, 40
    dot = np.random.default_rng(0).standard_normal((n, m)) * np.geomspace(1e-3, 1e3, m) * np.sign(scale)
    on_host = OnHost(score, SCORE, (n, m), head=head, scale=abs(scale), number=number)
    dots = np.ascontiguousarray(dot, dtype)
    logit, slope = np.empty_like(dots), np.empty_like(dots)
    on_host.library.ask(*on_host.arguments, *(x.ctypes.data_as(ctypes.c_void_p) for x in (dots, logit, slope)))
    s, q, kv = dots.astype(np.float64) * abs(scale), np.arange(n)[:, None], np.arange(m)[None]
    wanted, slope_in_python = score.logit(np, s, 1, head, q, kv), score.slope(np, s, 1, head, q, kv)
    assert (abs(logit - wanted) <= allowed * (abs(wanted) + abs(s) + 1e-6)).all(), "logits differ from those of logit"
    assert (abs(slope - (1.0 if slope_in_python is None else slope_in_python)) <= 2 * allowed).all(), (
        "derivatives differ from those of slope"
    )


def check_kernels(option: Any, role: str, arch: str) -> None:
    """Compiles kernels of the forward and of the gradients with a mask or a score: of many queries, and of few, whose heads share
    tiles. Raises AssertionError where one spills registers."""
    device, spec = TYPICAL[arch], Spec.of(**{role: option})
    for op in (Forward(BF16, 1, 1024, 1024, 8, 2, 128, 128, spec), Forward(BF16, 1, 4, 1024, 8, 2, 128, 128, spec)):
        for operation in (op, Backward(op)):
            selection = select(operation, device)
            for launch in selection.kernel.lower(operation, selection.config, device).launches:
                spilled = compiler.compile(launch.source).spill_bytes
                assert not spilled, f"{selection.kernel.name} for {operation} on {arch} spills {spilled} bytes of registers"


def check_option(option: Mask | Score, arch: str | None = "sm_90a") -> None:
    """Checks a mask or a score of your own, in CUDA, with its definition in Python.

    >>> rawattn.testing.check_option(Mine(7))

    Args:
        option: an option with the run-time values to check, from numbers that divide no tile: these find the most faults.
        arch: the GPUs for which kernels with it are compiled besides, forward and backward, such as "sm_89", or None for none.

    For a mask these are compared in each pair, for hundreds of lengths, tiles, offsets and some heads: ``row(q, first).keep``
    with ``interval`` (or ``keep``, where the tiles are a list), and ``kv_tiles`` and ``q_tiles`` (or ``classify``) with the tiles
    that are needed and full by it. For a score the operator is compared with ``logit`` and ``derivative`` with ``slope``, in
    float and double.

    Raises:
        AssertionError: file and definition differ, or a kernel spills registers; the message says where.
        ProblemError: it is no mask and no score, or the host's compiler refuses the file.
        UnsupportedError: there is no C++ compiler, c++ or g++. CompileError: NVRTC refuses a kernel, or is not there.
    """
    if not isinstance(option, Option) or (option.interval is None and option.logit is None):
        raise ProblemError(f"option is {option!r}; it must be a mask or a score with a CUDA type, an Option of rawattn.variant.")
    if option.interval is None:
        for arguments in (
            (number, head, scale) for number in ("fp32", "fp64") for head in range(4) for scale in (0.125, -0.5, 2.0)
        ):
            _run(check_score, option, *arguments)
    else:
        by_head = option.of_head is not None
        on_host = OnHost(option, MASK, (1, 1))
        if bool(ctypes.c_bool.in_dll(on_host.library, "differs_by_head")) != by_head:
            raise AssertionError(f"{option}: of_head is in {'Python' if by_head else 'CUDA'} alone; both say that heads differ.")
        for sizes in _list_sizes():
            if option.lists:
                _run(check_boxes, option, *sizes[:3], *sizes[4:5], sizes[6])
            else:
                _run(check_mask, option, *sizes)
                _run(check_inverse, option, *sizes[:3], *sizes[4:])
    if arch is not None:
        if arch not in TYPICAL:
            raise ProblemError(f"arch is {arch!r}; it must be None or one of {', '.join(map(repr, TYPICAL))}.")
        check_kernels(option, "mask" if option.interval is not None else "score", arch)


def _list_sizes() -> list[tuple[int, int, int, int, int, Offsets, int]]:
    """Lists lengths of q and of keys, tiles, offsets and heads for ``check_mask``: all small ones, then some of real sizes."""
    small = itertools.product(range(8), range(8), (4,), (2,), (2, 3), (None, (3, 5)), (0, 1))
    sizes: list[tuple[int, int, int, int, int, Offsets, int]] = list(small)
    rng = np.random.default_rng(0)
    for largest, count, tiles in ((60, 200, ((2, 1, 3), (6, 3, 5), (14, 7, 11))), (600, 100, ((64, 64, 48), (128, 64, 128)))):
        for i in range(count):
            q_len, kv_len, q_offset, kv_offset = rng.integers(0, largest, 4).tolist()
            offsets = (q_offset, kv_offset) if i % 2 else None
            sizes.append((q_len, kv_len, *tiles[i // 2 % len(tiles)], offsets, i % 5))
    return sizes


def _run(check: Any, option: Any, *arguments: Any) -> None:
    """Runs a check, and names the option and the arguments in its error."""
    try:
        check(option, *arguments)
    except AssertionError as error:
        names = check.__code__.co_varnames[1 : 1 + len(arguments)]
        where = ", ".join(f"{name} {value}" for name, value in zip(names, arguments, strict=True) if value is not None)
        raise AssertionError(f"{option}, {where}: {error}.") from None
