#pragma once
// variant/element/bf16.cuh without instructions of a GPU.
#include "threads.hpp"
#include "variant/element/word_operands.cuh"

struct Bf16 {
    using Number = float;
    using Operands = WordOperands;
    u16 bits;

    static u32 of_halves(u32 two) { return pack(ptx::widen_fp16(u16(two)), ptx::widen_fp16(u16(two >> 16))); }
    static float widen(Bf16 x) { return __builtin_bit_cast(float, u32(x.bits) << 16); }
    static Bf16 narrow(float x) {
        const u32 bits = __builtin_bit_cast(u32, x);
        return {u16(x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
    static u32 pack(float low, float high) { return narrow(low).bits | u32(narrow(high).bits) << 16; }
    static void multiply(float* d, const u32* a, const u32* b) { ptx::mma_bf16(d, a, b); }
};
