"""tile/tile.cuh and the rendered products: a warpgroup multiplies tiles that the TMA brought, whole numbers, so that the result
is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rawattn.kernel import render
from rawattn.variant.element import BF16, FP16, Element
from tests import snippet

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

LOAD = """
#include "tile/fragment.cuh"
#include "tile/tile.cuh"
template <class T>
__device__ void load(T& tile, const TmaTensor& tensor, ptx::Mbarrier& full, i32 stage) {
    full.arrive_expect(T::bytes);
    for (int panel = 0; panel < T::panels; ++panel) ptx::tma_load(tile.data[panel], tensor.map, full, panel * 64, 0, 0, stage);
}
__device__ i32 row_of(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * fragment_row(i); }
__device__ i32 column_of(int i) { return threadIdx.x % 4 * 2 + fragment_column(i); }
"""
# The lower 64 rows of the second of two stages, times the second of two other tiles.
COLUMNS = (
    LOAD
    + """
using ATile = Tile<128, cfg::depth>;
using BTile = Tile<cfg::n, cfg::depth>;
struct Smem { ATile a[2]; BTile b[2]; ptx::Mbarrier full; };
__device__ void run(const Args& args, unsigned char* raw) {
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) smem.full.init(4), ptx::fence_mbarrier_init();
    __syncthreads();
    if (threadIdx.x == 0)
        for (i32 s = 0; s < 2; ++s) load(smem.a[s], args.a, smem.full, s), load(smem.b[s], args.b, smem.full, s);
    smem.full.wait(0);
    const auto a = SmemDescriptor<ATile>::of_columns(smem.a).rows_from(64).stage(1);
    const auto b = SmemDescriptor<BTile>::of_columns(smem.b).stage(1);
    float d[Product::accumulators];
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < (cfg::depth + 15) / 16; ++k) Product::multiply(d, a.columns(k), b.columns(k), k > 0);
    ptx::wgmma_commit(), ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Product::accumulators; ++i) args.d[row_of(i) * cfg::n + column_of(i)] = d[i];
}
"""
)
# A matrix in registers, times the second of two tiles along its rows; added to ones.
ROWS = (
    LOAD
    + """
using BTile = Tile<cfg::depth, cfg::n>;
struct Smem { BTile b[2]; ptx::Mbarrier full; };
__device__ void run(const Args& args, unsigned char* raw) {
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) smem.full.init(2), ptx::fence_mbarrier_init();
    __syncthreads();
    if (threadIdx.x == 0)
        for (i32 s = 0; s < 2; ++s) load(smem.b[s], args.b, smem.full, s);
    smem.full.wait(0);
    const auto b = SmemDescriptor<BTile>::of_rows(smem.b).stage(1);
    float d[Product::accumulators];
    u32 a[cfg::depth / 4];
#pragma unroll
    for (int i = 0; i < Product::accumulators; ++i) d[i] = 1.f;
#pragma unroll
    for (int i = 0; i < cfg::depth / 2; i += 2) {
        const float* const at = args.a + row_of(i) * cfg::depth + column_of(i);
        a[i / 2] = Element::pack(at[0], at[1]);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < cfg::depth / 16; ++k) Product::multiply(d, a + 4 * k, b.rows(k), true);
    ptx::wgmma_commit(), ptx::wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Product::accumulators; ++i) args.d[row_of(i) * cfg::n + column_of(i)] = d[i];
}
"""
)
ELEMENTS = pytest.mark.parametrize("element", [BF16, FP16], ids=lambda element: element.name)


def numbers(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).integers(-8, 9, shape).astype(np.float32)


def stages(x: npt.NDArray[np.float32], element: Element) -> Any:
    """(stage, rows, columns) as (batch, rows, heads, columns) on the GPU."""
    return cupy.asarray(x.astype(element.dtype).view(np.uint16))[:, :, None]


@pytest.mark.parametrize(("depth", "n"), [(8, 32), (16, 64), (64, 256), (72, 48), (128, 80), (192, 112), (256, 32)])
@pytest.mark.parametrize("negate", [False, True], ids=["+", "-"])
@ELEMENTS
def test_product_along_columns(element: Element, negate: bool, depth: int, n: int) -> None:
    a, b, d = numbers(2, 128, depth), numbers(2, n, depth), cupy.zeros((64, n), "float32")
    product = render.wgmma("Product", element, n, a_in_registers=False, b_by_rows=False, negate=negate)
    a_stages, b_stages = stages(a, element), stages(b, element)
    args = {
        "a": ("TmaTensor", snippet.tensor(a_stages, 128)),
        "b": ("TmaTensor", snippet.tensor(b_stages, n)),
        "d": ("float*", d),
    }
    sizes = {"threads": 128, "smem_bytes": 2 * 128 * -(-depth // 64) * (128 + n) + 1024, "depth": depth, "n": n}
    snippet.run(COLUMNS, args, products=[product], options={"Element": element}, **sizes)
    np.testing.assert_array_equal(d.get(), (-1 if negate else 1) * a[1, 64:] @ b[1].T)


@pytest.mark.parametrize(("depth", "n"), [(32, 8), (48, 64), (80, 72), (112, 136), (176, 256), (256, 24)])
@ELEMENTS
def test_product_along_rows(element: Element, depth: int, n: int) -> None:
    a, b, d = numbers(64, depth), numbers(2, depth, n), cupy.zeros((64, n), "float32")
    product = render.wgmma("Product", element, n, a_in_registers=True, b_by_rows=True)
    a_rows, b_stages = cupy.asarray(a), stages(b, element)
    args = {"a": ("float*", a_rows), "b": ("TmaTensor", snippet.tensor(b_stages, depth)), "d": ("float*", d)}
    sizes = {"threads": 128, "smem_bytes": 2 * 128 * -(-n // 64) * depth + 1024, "depth": depth, "n": n}
    snippet.run(ROWS, args, products=[product], options={"Element": element}, **sizes)
    np.testing.assert_array_equal(d.get(), 1 + a @ b[1])
