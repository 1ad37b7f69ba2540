"""ptx/barrier.cuh: three warps hand a turn around."""

from __future__ import annotations

import pytest

from tests import snippet

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

TEXT = """
#include "ptx/barrier.cuh"
__device__ void run(const Args& args, unsigned char* smem) {
    volatile u32& count = *reinterpret_cast<volatile u32*>(smem);
    const u32 warp = threadIdx.x / 32;
    if (threadIdx.x == 64) count = 0;
    if (warp == 2) ptx::bar_arrive(1, 64);
    for (u32 round = 0; round < cfg::rounds; ++round) {
        ptx::bar_sync(1 + warp, 64);
        if (threadIdx.x % 32 == 0) args.log[3 * round + warp] = count, count = count + 1;
        __syncwarp();
        if (round + 1 < cfg::rounds || warp < 2) ptx::bar_arrive(1 + (warp + 1) % 3, 64);
    }
}
"""


def test_turns() -> None:
    log = cupy.zeros(300, "int32")
    snippet.run(TEXT, {"log": ("i32*", log)}, threads=96, smem_bytes=16, rounds=100)
    assert log.get().tolist() == [*range(300)]
