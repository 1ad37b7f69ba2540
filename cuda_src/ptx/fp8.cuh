#pragma once
// Conversion of two numbers of eight bits, as their bits, the first one in the lower half. It is exact. From sm_89 on.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#include "ptx/base.cuh"

namespace ptx {
__device__ inline u32 widen_e4m3(u16 pair) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    return halves;
}
}  // namespace ptx
