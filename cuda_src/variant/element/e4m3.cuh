#pragma once
// Eight bits: a sign, four of exponent and three of fraction; NaN and no infinity. E4M3 of https://arxiv.org/abs/2209.05433.
#include "ptx/fp16.cuh"
#include "ptx/fp8.cuh"
#include "variant/element/byte_operands.cuh"

struct E4m3 {
    using Number = float;
    using Operands = ByteOperands<E4m3>;
    static constexpr float largest = 448;
    unsigned char bits;

    // Numbers 0 and 1, and 2 and 3, of a word as halves; numbers 0 and 2, and 1 and 3.
    __device__ static void pairs_of_k(u32 (&halves)[2], u32 word) { ptx::widen_e4m3(halves, word); }
    __device__ static void pairs_of_v(u32 (&halves)[2], u32 word) { ptx::widen_e4m3(halves, __byte_perm(word, 0, 0x3120)); }

    // A word's numbers.
    __device__ static void widen(float (&x)[4], u32 word) {
        u32 halves[2];
        ptx::widen_e4m3(halves, word);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = ptx::widen_fp16(u16(halves[i / 2] >> i % 2 * 16));
    }
    __device__ static float widen(E4m3 x) {
        const u32 size = x.bits & 0x7f, sign = u32(x.bits & 0x80) << 24;
        return __uint_as_float((size == 0x7f ? 0x7fc00000 : __float_as_uint(__uint_as_float(size << 20) * 0x1p120f)) | sign);
    }
    // To nearest even; what is larger than the largest number becomes that one, infinity too.
    __device__ static E4m3 narrow(float x) {
        const u32 sign = __float_as_uint(x) >> 31 << 7;
        const float y = min(__uint_as_float(__float_as_uint(x) & 0x7fffffff), largest);
        const u32 bits = __float_as_uint(y), rounded = (bits + 0x7ffff + (bits >> 20 & 1) >> 20) - (120 << 3);
        const u32 subnormal = __float_as_uint(y + 16384.f) - __float_as_uint(16384.f);  // of which the last place is 2^-9
        const u32 size = y < 0x1p-6f ? subnormal : rounded;
        return {(unsigned char)(sign | (x != x ? 0x7f : size))};
    }
};
