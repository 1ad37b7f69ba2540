#pragma once
// IEEE half precision.
#include "ptx/mma.cuh"
#include "variant/element/word_operands.cuh"

struct Fp16 {
    using Number = float;  // what it is computed in
    using Operands = WordOperands;
    u16 bits;

    __device__ static u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    __device__ static void multiply(float* d, const u32* a, const u32* b) { ptx::mma_fp16(d, a, b); }

    // Two numbers of half precision in this format.
    __device__ static u32 of_halves(u32 two) { return two; }

    __device__ static float widen(Fp16 x) {
        float wide;
        asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
        return wide;
    }
    __device__ static Fp16 narrow(float x) {
        Fp16 half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
        return half;
    }
};
