#pragma once
// Conversion of four numbers of eight bits to halves, two in a word, the first one in the lower half. It is exact. From sm_89 on.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#include "ptx/base.cuh"

namespace ptx {
__device__ inline void widen_e4m3(u32 (&halves)[2], u32 four) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(halves[0]), "=r"(halves[1]) : "r"(four));
}
}  // namespace ptx
