#pragma once
// IEEE half precision.
#include "ptx/mma.cuh"

struct Element {
    u16 bits;

    __device__ static u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    __device__ static void multiply(float* d, const u32* a, const u32* b) { ptx::mma_fp16(d, a, b); }
};
