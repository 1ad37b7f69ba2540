#pragma once
// bfloat16: the upper half of a float32.
#include "ptx/fp16.cuh"
#include "ptx/mma.cuh"
#include "variant/element/word_operands.cuh"

struct Bf16 {
    using Number = float;  // what it is computed in
    using Operands = WordOperands;
    u16 bits;

    __device__ static u32 pack(float low, float high) {
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
        return both;
    }
    __device__ static void multiply(float* d, const u32* a, const u32* b) { ptx::mma_bf16(d, a, b); }

    // Two numbers of half precision in this format.
    __device__ static u32 of_halves(u32 two) { return pack(ptx::widen_fp16(u16(two)), ptx::widen_fp16(u16(two >> 16))); }

    __device__ static float widen(Bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
    // To nearest even, by hand: GPUs before Ampere have no instruction for it.
    __device__ static Bf16 narrow(float x) {
        const u32 bits = __float_as_uint(x);
        return {u16(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};
