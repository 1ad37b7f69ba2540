#pragma once
// variant/element/fp16.cuh without instructions of a GPU.
#include "threads.hpp"
#include "variant/element/word_operands.cuh"

struct Fp16 {
    using Number = float;
    using Operands = WordOperands;
    u16 bits;

    static u32 of_halves(u32 two) { return two; }
    static float widen(Fp16 x) { return ptx::widen_fp16(x.bits); }
    static Fp16 narrow(float x) { return {__builtin_bit_cast(u16, _Float16(x))}; }
    static u32 pack(float low, float high) { return narrow(low).bits | u32(narrow(high).bits) << 16; }
    static void multiply(float* d, const u32* a, const u32* b) { ptx::mma_fp16(d, a, b); }
};
