"""Number formats of eight bits: what their CUDA files make of every number, compiled for the host, and ml_dtypes'."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import tempfile

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from rawattn.kernel import render
from rawattn.variant.element import E4M3, E4M3_BITS, FP8, Element
from tests import emulator

TEXT = """
#include "threads.hpp"
#include "variant/element/FILE.cuh"
extern "C" void widen(const TYPE* x, float* y, int n) {
    for (int i = 0; i < n; ++i) y[i] = TYPE::widen(x[i]);
}
extern "C" void narrow(const float* x, TYPE* y, int n) {
    for (int i = 0; i < n; ++i) y[i] = TYPE::narrow(x[i]);
}
extern "C" void pairs(u32 word, u32 (&k)[2], u32 (&v)[2]) {
    TYPE::pairs_of_k(k, word), TYPE::pairs_of_v(v, word);
}
"""
FOUR = """
#include "threads.hpp"
#include "variant/element/FILE.cuh"
extern "C" void widen(u32 word, float (&x)[4]) { TYPE::widen(x, word); }
"""
FILES = tuple(f"variant/element/{name}.cuh" for name in ("byte_operands", "e4m3", "e4m3bits", "e5m2"))
EVERY = np.arange(256, dtype=np.uint8)


@functools.cache
def library(element: Element, text: str = TEXT) -> ctypes.CDLL:
    text = text.replace("FILE", element.name).replace("TYPE", element.cuda_type)
    files = {path: (render.FOLDER / path).read_text() for path in FILES}
    return emulator.compiled(text, files, pathlib.Path(tempfile.mkdtemp()))


def call(function: ctypes._NamedFuncPointer, x: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    found = np.empty(x.shape, dtype)
    function(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(found.ctypes.data), ctypes.c_int(x.size))
    return found


@pytest.mark.parametrize("element", FP8.values(), ids=FP8)
def test_numbers_are_widened_exactly(element: Element) -> None:
    wanted = EVERY.view(element.dtype).astype(np.float32)
    found = call(library(element).widen, EVERY, np.float32)
    np.testing.assert_array_equal(found, wanted)
    assert np.array_equal(np.signbit(found), np.signbit(wanted)) and element.largest == np.nanmax(
        np.where(np.isfinite(wanted), wanted, 0)
    )


@pytest.mark.parametrize("element", FP8.values(), ids=FP8)
def test_numbers_are_rounded_to_nearest_even(element: Element) -> None:
    """Of every upper half of a float32, and beside it; ml_dtypes rounds so, but to NaN or infinity beyond the largest number."""
    bits = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint32)
    x = bits.view(np.float32).ravel()
    wanted = np.clip(x, -element.largest, element.largest).astype(element.dtype).astype(np.float32)
    found = call(library(element).narrow, x, np.uint8).view(element.dtype).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    some = ~np.isnan(x)
    assert np.array_equal(np.signbit(found[some]), np.signbit(x[some]))


@pytest.mark.parametrize("element", FP8.values(), ids=FP8)
def test_words_become_halves(element: Element) -> None:
    """Of neighbours for K, of every second number for V."""
    k, v = np.zeros(2, np.uint32), np.zeros(2, np.uint32)
    for first in range(256):
        four = np.array([first, 255 - first, first ^ 0x55, (first * 7 + 3) % 256], np.uint8)
        word, (a, b, c, d) = int(four.view(np.uint32)[0]), four.view(element.dtype).astype(np.float32)
        library(element).pairs(ctypes.c_uint32(word), ctypes.c_void_p(k.ctypes.data), ctypes.c_void_p(v.ctypes.data))
        np.testing.assert_array_equal(k.view(np.float16).astype(np.float32), [a, b, c, d])
        np.testing.assert_array_equal(v.view(np.float16).astype(np.float32), [a, c, b, d])


@pytest.mark.parametrize("element", [E4M3, E4M3_BITS], ids=str)
def test_words_become_numbers(element: Element) -> None:
    """By an instruction and without: every number at each place of a word, beside any others."""
    x = np.empty(4, np.float32)
    for four in np.random.default_rng(0).permuted(np.tile(EVERY, (4, 1)), axis=1).T.copy():
        library(element, FOUR).widen(ctypes.c_uint32(int(four.view(np.uint32)[0])), ctypes.c_void_p(x.ctypes.data))
        wanted = four.view(element.dtype).astype(np.float32)
        np.testing.assert_array_equal(x, wanted)
        assert np.array_equal(np.signbit(x[wanted == 0]), np.signbit(wanted[wanted == 0]))


def test_formats_are_those_of_the_reference_types() -> None:
    assert [np.dtype(x.dtype) for x in FP8.values()] == [np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)]
