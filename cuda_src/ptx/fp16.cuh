#pragma once
// Conversion of half precision, as its bits: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
#include "ptx/base.cuh"

namespace ptx {
__device__ inline float widen_fp16(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
__device__ inline u16 narrow_fp16(float x) {
    u16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
}  // namespace ptx
