#pragma once
// The same format for GPUs before sm_89, which have no instruction that widens it.
#include "variant/element/e4m3.cuh"

struct E4m3bits : E4m3 {
    // A word's numbers: their bits are those of a float32 whose exponent is 120 too small, but for NaN.
    __device__ static void widen(float (&x)[4], u32 word) {
        const u32 nan = (word & 0x7f7f7f7f) + 0x01010101;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float y = __uint_as_float(u32(i32(word << 24 - 8 * i) >> 4) & 0x87f00000) * 0x1p120f;
            x[i] = nan >> 8 * i & 0x80 ? __uint_as_float(0x7fc00000) : y;
        }
    }
};
