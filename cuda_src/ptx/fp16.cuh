#pragma once
// Half precision, as its bits: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
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
// All ones in each half whose lower 15 bits, as an integer, are at least those of `limits`, which is at most 0x7c00: numbers without
// their signs are in the order of their bits, and NaN, whose bits are above, is unordered.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-comparison-instructions-set
__device__ inline u32 halves_from(u32 x, u32 limits) {
    u32 size, found;
    asm("abs.f16x2 %0, %1;" : "=r"(size) : "r"(x));
    asm("set.geu.u32.f16x2 %0, %1, %2;" : "=r"(found) : "r"(size), "r"(limits));
    return found;
}
// x and y, but 0 for that whose half of `word` is 0, the lower one being of x.
__device__ inline void keep_where(float& x, float& y, u32 word) {
    asm("{ .reg .pred p, q; setp.neu.f16x2 p|q, %2, %3; selp.f32 %0, %0, 0f00000000, p; selp.f32 %1, %1, 0f00000000, q; }"
        : "+f"(x), "+f"(y) : "r"(word), "r"(0));
}
}  // namespace ptx
