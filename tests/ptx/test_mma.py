"""ptx/mma.cuh and ptx/ldmatrix.cuh: a warp's product from shared memory, of whole numbers, so that it is exact."""

from __future__ import annotations

import numpy as np
import pytest

from rawattn.variant.element import BF16, FP16, Element
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
