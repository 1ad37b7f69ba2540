"""Structs that were written from Python functions, compiled for the host with g++: many of them in one library."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn import trace
from rawattn.kernel import render
from rawattn.trace.pyramid import Pyramid
from rawattn.variant.field import AxisStride, Dim, Field, Fields, Pointer, Scratch
from rawattn.variant.function import FunctionMask, FunctionScore, option_of
from tests import emulator

Array = npt.NDArray[Any]
_numbers = itertools.count()  # libraries of one process share names
INCLUDE = re.compile(r'#include "([^"]+)"')
HEAD = """\
#include "threads.hpp"
#include "function/sequence.cuh"
#include "function/pyramid.cuh"
#include "variant/work_tile.cuh"
struct Rows {
    i32 q_len, kv_len, q_offset, kv_offset;
    Extent seen;
    Extent extent() const { return seen; }
};
"""
MASK = """
template <class M>
bool differs_by_parts(const M& mask, i32 q, i32 kv, bool kept) {{
    if constexpr (requires {{ mask.key(kv); }}) return kept != mask.keep(q, kv, mask.query(q), mask.key(kv));
    return false;
}}
extern "C" void keep_{i}(const Args* args, const Rows* rows, i32 b, i32 h, i32 step, bool* kept) {{
    const FunctionMask mask(*args, *rows, {{b, h, 0, 0}});
    for (i32 q = 0; q < rows->q_len; ++q)
        for (i32 first = 0; first < rows->kv_len; first += step) {{
            const auto row = mask.row(q, first);
            for (i32 x = 0; x < step; ++x) *kept++ = row.keep(x) ^ differs_by_parts(mask, q, first + x, row.keep(x));
        }}
}}
extern "C" void classify_{i}(const Args* args, const Rows* rows, i32 b, i32 h_first, i32 h_last, i32 tile_q, i32 tile_kv,
                             signed char* found) {{
    const FunctionMask mask(*args, *rows, {{b, h_first, 0, 0}});
    for (i32 q = 0; q < rows->q_len; q += tile_q)
        for (i32 kv = 0; kv < rows->kv_len; kv += tile_kv)
            *found++ = mask.classify({{q, q + tile_q - 1}}, {{h_first, h_last}}, {{kv, kv + tile_kv - 1}});
}}
"""
SCORE = """
template <class R>
void by_pair(const R& own, const Number* s, i32 offset, i32* pairs, i32* wrong) {{
    if constexpr (requires {{ own.has_pairs(0); }}) {{
        if (!own.has_pairs(offset + 1)) return;
        Number x = s[0], y = s[1];
        own.pair(x, y, offset);
        ++*pairs, *wrong += x != own.value(s[0], offset) || y != own.value(s[1], offset + 1);
    }}
}}
template <class S, class R>
void on_diagonal(const S& score, const R& own, Number s, i32 q, i32 above, i32 first, i32 offset, i32* pairs, i32* wrong) {{
    if constexpr (requires {{ own.value_on(s, 0, s); }}) {{  // of the first pair of a diagonal of 16 rows and `step` keys
        const i32 back = min(above, offset);
        const Number shared = score.row(q - back, first + offset - back).diagonal(0);
        ++*pairs, *wrong += own.value_on(s, offset, shared) != own.value(s, offset);
    }}
}}
extern "C" void score_{i}(const Args* args, const Rows* rows, i32 b, i32 h, i32 step, const Number* s, Number* value,
                          Number* slope, Number* exponent, i32* pairs, i32* wrong) {{
    const FunctionScore score(*args, *rows, {{b, h, 0, 0}});
    for (i32 q = 0; q < rows->q_len; ++q)
        for (i32 kv = 0; kv < rows->kv_len; ++kv, ++s) {{
            const i32 first = kv / step * step + rows->kv_offset;
            const auto row = score.row(q + rows->q_offset, first);
            const Number less = Number(0.25) * (q % 5);
            const auto exponents = score.exponents(q + rows->q_offset, first, less);
            *exponent++ = exponents.value(*s, kv + rows->kv_offset - first) - less;
            if (kv % 2 == 0) by_pair(row, s, kv + rows->kv_offset - first, pairs, wrong);
            if (kv % 2 == 0) by_pair(exponents, s, kv + rows->kv_offset - first, pairs, wrong);
            on_diagonal(score, row, *s, q + rows->q_offset, q % 16, first, kv % step, pairs + 1, wrong + 1);
            on_diagonal(score, exponents, *s, q + rows->q_offset, q % 16, first, kv % step, pairs + 1, wrong + 1);
            *value++ = row.value(*s, kv + rows->kv_offset - first), *slope++ = row.slope(*s, kv + rows->kv_offset - first);
        }}
}}
"""


def function(option: Any, role: str, limits: Sequence[int]) -> tuple[Any, tuple[Any, ...]]:
    """The option of a Python function, recognised or not, and the arrays that it captured."""
    traced, arrays, numbers = trace.bind(option, role)
    forms = [(element, array.shape) for (element, _), array in zip(traced.code.arrays, arrays, strict=True)]
    return option_of(traced, forms, numbers, limits), arrays


def files(*paths: str) -> dict[str, str]:
    """The files of ``cuda_src/`` that these reach, or the structs."""
    found: dict[str, str] = {}
    pending = [*paths] or ["function/sequence.cuh", "function/pyramid.cuh", "variant/work_tile.cuh"]
    while pending:
        path = pending.pop()
        if path not in found:
            found[path] = (render.FOLDER / path).read_text()
            pending += INCLUDE.findall(found[path])
    return found


class Library:
    """The structs of some options. Each has its own Args, and the numbers of scores are of one format."""

    def __init__(self, options: Sequence[Any], folder: pathlib.Path, number: str = "fp32") -> None:
        self.options, self.number = list(options), number
        ctype = {"fp32": "float", "fp64": "double"}[number]
        parts = [self._part(i, option, ctype) for i, option in enumerate(options)]
        self._library = emulator.compiled(HEAD + "\n".join(parts), files(), folder)

    @property
    def dtype(self) -> Any:
        return {"fp32": np.float32, "fp64": np.float64}[self.number]

    def _part(self, i: int, option: Any, ctype: str) -> str:
        (text,) = option.texts.values()
        text = INCLUDE.sub("", text).replace("#pragma once", "")
        args = "".join(f"    {field.ctype} {field.name};\n" for field in self.fields(option))
        questions = (MASK if isinstance(option, FunctionMask) else SCORE).format(i=i)
        return f"namespace n{next(_numbers)} {{\nusing Number = {ctype};\nstruct Args {{\n{args}}};\n{text}{questions}}}\n"

    @staticmethod
    def fields(option: Any) -> Fields:
        return (Field("scale", "Number"), *option.fields)

    def _asked(
        self, option: Any, arrays: Sequence[Array], lengths: tuple[int, int], offsets: tuple[int, int], scale: float = 1.0
    ) -> tuple[Any, Any]:  # fmt: skip
        """The bytes of Args and of Rows."""
        self._alive: list[Array] = []
        values = {"scale": scale, **option.values}
        given = [values[f.name] if f.name in values else self._filled(f, option, arrays) for f in self.fields(option)]
        args = render.layout(self.fields(option), self.number).pack.pack(*given)
        q_len, kv_len = lengths
        longest = max(offsets[0] + q_len, offsets[1] + kv_len)
        seen = (longest, longest) if any(offsets) else lengths
        rows = (ctypes.c_int * 8)(q_len, kv_len, *offsets, *seen, 0, 0)
        return ctypes.create_string_buffer(args, len(args)), rows

    def _filled(self, field: Field, option: Any, arrays: Sequence[Array]) -> int:
        names = [each.name for each in option.arrays]
        match field.fill:
            case Pointer(operand):
                return int(arrays[names.index(operand)].ctypes.data)
            case Dim(operand, axis):
                return int(arrays[names.index(operand)].shape[axis])
            case AxisStride(operand, axis):
                array = arrays[names.index(operand)]
                return int(array.strides[axis] // array.itemsize)
            case Scratch(name):
                i = names.index(name.removesuffix("_pyramid"))
                flat = np.ascontiguousarray(Pyramid(arrays[i], option.arrays[i].pyramid).flat())
                self._alive.append(flat)
                return int(flat.ctypes.data)
        raise AssertionError(field)

    def keep(
        self, i: int, option: Any, arrays: Sequence[Array], b: int, h: int, lengths: tuple[int, int], step: int = 64,
        offsets: tuple[int, int] = (0, 0),
    ) -> Array:  # fmt: skip
        """Returns which keys each query keeps, in rows of whole steps."""
        kept = np.ones((lengths[0], -(-lengths[1] // step) * step), bool)
        args, rows = self._asked(option, arrays, lengths, offsets)
        getattr(self._library, f"keep_{i}")(args, rows, b, h, step, kept.ctypes.data_as(ctypes.c_void_p))
        return kept

    def classify(
        self, i: int, option: Any, arrays: Sequence[Array], b: int, heads: tuple[int, int], lengths: tuple[int, int],
        tile: tuple[int, int], offsets: tuple[int, int] = (0, 0),
    ) -> Array:  # fmt: skip
        """The class of each tile."""
        found = np.full(tuple(-(-n // size) for n, size in zip(lengths, tile, strict=True)), 9, np.int8)
        args, rows = self._asked(option, arrays, lengths, offsets)
        getattr(self._library, f"classify_{i}")(args, rows, b, *heads, *tile, found.ctypes.data_as(ctypes.c_void_p))
        return found

    def score(
        self, i: int, option: FunctionScore, arrays: Sequence[Array], b: int, h: int, s: Array, scale: float = 1.0,
        offsets: tuple[int, int] = (0, 0), step: int = 32,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """The logits and the slopes of these dot products, (queries, keys), and the logits in log2 units, as exponents."""
        given = np.ascontiguousarray(s, self.dtype)
        value, slope, exponent = np.empty_like(given), np.empty_like(given), np.empty_like(given)
        args, rows = self._asked(option, arrays, (s.shape[0], s.shape[1]), offsets, scale)
        pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (given, value, slope, exponent))
        self.pairs, wrong = (ctypes.c_int * 2)(), (ctypes.c_int * 2)()  # how many were computed by twos, and by diagonals
        getattr(self._library, f"score_{i}")(args, rows, b, h, step, *pointers, self.pairs, wrong)
        assert wrong[0] == 0, "two keys together are not what they are one by one"
        assert wrong[1] == 0, "pairs of a diagonal do not share what they are said to share"
        return value, slope, exponent
