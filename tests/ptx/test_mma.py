"""ptx/mma.cuh and ptx/ldmatrix.cuh: a warp's product from shared memory, of whole numbers, so that it is exact; and float32 by
ptx/mma_tf32.cuh."""

from __future__ import annotations

import numpy as np
import pytest

from rawattn.variant.element import BF16, FP16, FP32, Element
from tests import snippet

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

# d = a b^T of 16 x 16 matrices. b comes as it is stored, or transposed from its transpose.
TEXT = """
#include "ptx/ldmatrix.cuh"
#include "tile/fragment.cuh"
__device__ void run(const Args& args, unsigned char* smem) {
    u16* const both = reinterpret_cast<u16*>(smem);
    for (u32 i = threadIdx.x; i < 512; i += 32) both[i] = args.ab[i].bits;
    __syncwarp();
    const u32 lane = threadIdx.x, address = ptx::smem_address(smem);
    u32 a[4], b[4];
    ptx::ldmatrix(a, address + lane % 16 * 32 + lane / 16 * 16);
    if (cfg::transposed) ptx::ldmatrix_transposed(b, address + 512 + lane % 16 * 32 + lane / 16 * 16);
    else ptx::ldmatrix(b, address + 512 + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16);
    float d[8] = {};
    Element::multiply(d, a, b), Element::multiply(d + 4, a, b + 2);
    for (int i = 0; i < 8; ++i) args.d[(lane / 4 + 8 * fragment_row(i)) * 16 + lane % 4 * 2 + fragment_column(i)] = d[i];
}
"""


@pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])
@pytest.mark.parametrize("element", [BF16, FP16], ids=lambda element: element.name)
def test_product(element: Element, transposed: bool) -> None:
    a, b = np.random.default_rng(0).integers(-9, 10, (2, 16, 16)).astype(np.float32)
    ab = cupy.asarray(np.stack([a, b.T if transposed else b]).astype(element.dtype).view(np.uint16))
    d = cupy.zeros((16, 16), "float32")
    args = {"ab": ("Element*", ab), "d": ("float*", d)}
    snippet.run(TEXT, args, smem_bytes=1024, options={"Element": element}, transposed=int(transposed))
    np.testing.assert_array_equal(d.get(), a @ b.T)


FLOAT32 = """
#include "tile/fragment.cuh"
__device__ void run(const Args& args, unsigned char*) {
    const u32 lane = threadIdx.x;
    u32 a[8], b[8];
    for (u32 i = 0; i < 8; ++i) {
        a[i] = __float_as_uint(args.a[(lane / 4 + i % 2 * 8) * 16 + i / 4 * 8 + lane % 4 + i / 2 % 2 * 4].value);
        b[i] = __float_as_uint(args.b[(lane / 4 + i / 4 * 8) * 16 + i / 2 % 2 * 8 + lane % 4 + i % 2 * 4].value);
    }
    float d[8] = {};
    Element::multiply(d, a, b), Element::multiply(d + 4, a, b + 4);
    for (int i = 0; i < 8; ++i) args.d[(lane / 4 + 8 * fragment_row(i)) * 16 + lane % 4 * 2 + fragment_column(i)] = d[i];
}
"""


WHOLE = {"whole": (3000, 60), "whole, the other way": (60, 3000)}  # of which the larger have two parts


@pytest.mark.parametrize("numbers", [*WHOLE, "normal", "small", "large"])
def test_product_of_float32(numbers: str) -> None:
    """It errs by some units in the last place of the sum of its terms' sizes, and of whole numbers not at all."""
    rng = np.random.default_rng(0)
    if numbers in WHOLE:
        a, b = (rng.integers(-most, most + 1, (16, 16)).astype(np.float32) for most in WHOLE[numbers])
    else:
        a, b = rng.standard_normal((2, 16, 16)).astype(np.float32)
        a = np.ldexp(a, {"normal": 0, "small": -100, "large": 100}[numbers])
    d = cupy.zeros((16, 16), "float32")
    args = {"a": ("Element*", cupy.asarray(a)), "b": ("Element*", cupy.asarray(b)), "d": ("float*", d)}
    snippet.run(FLOAT32, args, options={"Element": FP32})
    a, b = a.astype(np.float64), b.astype(np.float64)
    allowed = 0.0 if numbers in WHOLE else 2.0**-20 * (np.abs(a) @ np.abs(b.T))
    assert (np.abs(d.get() - a @ b.T) <= allowed).all()
