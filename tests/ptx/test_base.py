"""ptx/base.cuh against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests import snippet

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


def mapped(function: str, x: Any) -> npt.NDArray[np.float64]:
    """A function of the file, of each number."""
    text = f"""
__device__ void run(const Args& args, unsigned char*) {{
    for (i32 i = threadIdx.x; i < args.count; i += cfg::threads) args.y[i] = ptx::{function}(args.x[i]);
}}
"""
    given = cupy.asarray(np.asarray(x, np.float32))
    found = cupy.zeros_like(given)
    snippet.run(text, {"x": ("float*", given), "y": ("float*", found), "count": ("i32", given.size)}, threads=256)
    return found.get().astype(np.float64)


def test_exp2() -> None:
    x = np.concatenate([np.linspace(-125.9, 127.9, 200_001), np.linspace(-1e-3, 1e-3, 2001)]).astype(np.float32)
    wanted = np.exp2(x.astype(np.float64))
    assert (np.abs(mapped("exp2", x) - wanted) <= 2.0**-22 * wanted).all()
    np.testing.assert_array_equal(
        mapped("exp2", [0, -150, -np.inf, -1e38, 128, np.inf, np.nan]), [1, 0, 0, 0, np.inf, np.inf, np.nan]
    )


def test_reciprocal() -> None:
    x = np.concatenate([np.geomspace(1.2e-38, 8e37, 100_001), -np.geomspace(1e-30, 1e30, 101)]).astype(np.float32)
    wanted = 1 / x.astype(np.float64)
    assert (np.abs(mapped("reciprocal", x) - wanted) <= 2.0**-23 * np.abs(wanted)).all()
    np.testing.assert_array_equal(mapped("reciprocal", [np.inf, 0, np.nan]), [0, np.inf, np.nan])


def test_uniform() -> None:
    x = cupy.asarray(np.arange(100, 196, dtype=np.int32))
    text = "__device__ void run(const Args& args, unsigned char*) { args.x[threadIdx.x] = ptx::uniform(args.x[threadIdx.x]); }"
    snippet.run(text, {"x": ("i32*", x)}, threads=96)
    assert x.get().tolist() == [100] * 32 + [132] * 32 + [164] * 32
