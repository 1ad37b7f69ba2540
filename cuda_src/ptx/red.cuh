#pragma once
// Adds to global memory that give nothing back: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-red
// Each number is added at once; adds of several threads to one place may come in any order, which sets the rounding.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void red_add(float* to, const float (&x)[1]) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x[0]) : "memory");
}
// Four numbers on end, on a multiple of 16 bytes: from sm_90 on.
__device__ inline void red_add(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

}  // namespace ptx
