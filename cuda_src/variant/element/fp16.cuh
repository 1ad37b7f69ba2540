#pragma once
// IEEE half precision.
#include "ptx/base.cuh"

struct Element {
    u16 bits;

    __device__ static u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
};
