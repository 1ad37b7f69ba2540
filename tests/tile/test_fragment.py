"""tile/fragment.cuh: what the lanes of a warp exchange, and the folds over a row."""

from __future__ import annotations

import numpy as np
import pytest

from tests import snippet

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

INCLUDE = '#include "tile/fragment.cuh"\n'


def test_transpose_quad() -> None:
    text = """
__device__ void run(const Args& args, unsigned char*) {
    u32 x[4];
    for (int i = 0; i < 4; ++i) x[i] = args.x[4 * threadIdx.x + i];
    transpose_quad(x);
    for (int i = 0; i < 4; ++i) args.x[4 * threadIdx.x + i] = x[i];
}
"""
    x = cupy.asarray(np.arange(128, dtype=np.int32))
    snippet.run(INCLUDE + text, {"x": ("i32*", x)})
    np.testing.assert_array_equal(x.get().reshape(8, 4, 4), np.arange(128).reshape(8, 4, 4).swapaxes(1, 2))


def test_quad_max_and_sum() -> None:
    text = """
__device__ void run(const Args& args, unsigned char*) {
    args.max[threadIdx.x] = quad_max(args.x[threadIdx.x]), args.sum[threadIdx.x] = quad_sum(args.x[threadIdx.x]);
}
"""
    x = cupy.asarray(np.random.default_rng(0).integers(-99, 100, 32).astype(np.float32))
    top, total = cupy.zeros_like(x), cupy.zeros_like(x)
    snippet.run(INCLUDE + text, {"x": ("float*", x), "max": ("float*", top), "sum": ("float*", total)})
    quads = x.get().reshape(8, 4)
    np.testing.assert_array_equal(top.get(), quads.max(1).repeat(4))
    np.testing.assert_array_equal(total.get(), quads.sum(1).repeat(4))


@pytest.mark.parametrize("m_tiles_per_warp", [1, 2])
@pytest.mark.parametrize("n", [4, 8, 12, 16, 20, 64, 128])
def test_fold_row(n: int, m_tiles_per_warp: int) -> None:
    text = """
__device__ void run(const Args& args, unsigned char*) {
    float s[cfg::n];
    for (int i = 0; i < cfg::n; ++i) s[i] = args.s[cfg::n * threadIdx.x + i];
    for (int r = 0; r < rows_each; ++r) {
        args.max[rows_each * threadIdx.x + r] = fold_row(s, r, [](float a, float b) { return fmaxf(a, b); });
        args.sum[rows_each * threadIdx.x + r] = fold_row(s, r, [](float a, float b) { return a + b; });
    }
}
"""
    s = cupy.asarray(np.random.default_rng(n).integers(-99, 100, (32, n * m_tiles_per_warp)).astype(np.float32))
    top, total = cupy.zeros((32, 2 * m_tiles_per_warp), "float32"), cupy.zeros((32, 2 * m_tiles_per_warp), "float32")
    args = {"s": ("float*", s), "max": ("float*", top), "sum": ("float*", total)}
    snippet.run(INCLUDE + text, args, n=n * m_tiles_per_warp, m_tiles_per_warp=m_tiles_per_warp)
    rows = s.get().reshape(32, n // 4, 2 * m_tiles_per_warp, 2)  # registers of the upmost row, and of those below, in pairs
    np.testing.assert_array_equal(top.get(), rows.max((1, 3)))
    np.testing.assert_array_equal(total.get(), rows.sum((1, 3)))
