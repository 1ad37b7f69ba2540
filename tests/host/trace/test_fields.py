"""Division by captured numbers, without a branch: what ``integer.cuh`` computes of what the host makes, on the host."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.trace.expressions import make
from rawattn.trace.fields import Divisor
from tests.native import library

TEXT = """\
#include <cmath>
using std::fmax, std::fmaxf, std::fmin, std::fminf;
using u64 = unsigned long long;
#include "function/integer.cuh"
extern "C" void divide(const i32* x, i32 n, const function::Divisor* d, i32* found, i32* natural) {
    for (i32 i = 0; i < n; ++i) found[i] = function::floordiv(x[i], *d), natural[i] = x[i] < 0 ? 0 : function::udiv(x[i], *d);
}
"""
EDGES = np.array([0, 1, 2, 63, 64, 65, (1 << 31) - 2, (1 << 31) - 1], np.int64)


@pytest.fixture(scope="module")
def divide(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return library(TEXT, tmp_path_factory.mktemp("divisor"))


def quotients(divide: ctypes.CDLL, x: npt.NDArray[np.int64], d: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    given, found, natural = x.astype(np.int32), *np.empty((2, len(x)), np.int32)
    number = Divisor(make("const", "int", (d,)), np.float64).value([], [])
    divide.divide(
        given.ctypes.data_as(ctypes.c_void_p),
        len(x),
        number,
        found.ctypes.data_as(ctypes.c_void_p),
        natural.ctypes.data_as(ctypes.c_void_p),
    )
    return found, natural


@given(st.data())
def test_quotients(divide: ctypes.CDLL, data: st.DataObject) -> None:
    """Rounded down, of every sign; 0 where the divisor is 0; and of numbers from 0 up by positive ones."""
    most = (1 << 31) - 1
    d = data.draw(st.one_of(st.integers(-most, most), st.integers(-70, 70), st.sampled_from([1 << i for i in range(31)])))
    near = [d * data.draw(st.integers(0, most // max(1, abs(d)))) + i for i in (-1, 0, 1)]
    x = np.array([*EDGES, *-EDGES, *near, *data.draw(st.lists(st.integers(-most, most), max_size=20))], np.int64)
    x = x[abs(x) <= most]
    found, natural = quotients(divide, x, d)
    assert (found == (x // d if d else 0)).all()
    assert d < 1 or (natural[x >= 0] == x[x >= 0] // d).all()
