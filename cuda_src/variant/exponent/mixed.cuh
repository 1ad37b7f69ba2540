#pragma once
// One exponential of cfg::polynomial_each by a polynomial, on units that have instructions to spare where ex2 binds. 2^x is 2^j times 2^f,
// |f| <= 1/2, of which the polynomial of degree 3 is within 7.5e-5: a fiftieth of what a weight is rounded by in bf16. Below -126 it is
// 2^-126, where ex2 gives 0. (The idea is FlashAttention 4's.)
#include "ptx/base.cuh"

struct MixedEx2 {
    __device__ static float of(float x, int i) { return i % cfg::polynomial_each == cfg::polynomial_each - 1 ? polynomial(x) : ptx::exp2(x); }
    __device__ static float polynomial(float x) {
        constexpr float shift = 12582912.f;  // 1.5 * 2^23: a number is rounded to an integer, which is in the lower bits
        x = max(x, -126.f);
        const float rounded = __fadd_rn(x, shift), f = __fsub_rn(x, __fsub_rn(rounded, shift));
        const float y = __fmaf_rn(__fmaf_rn(__fmaf_rn(0.05517167f, f, 0.24261114f), f, 0.69326099f), f, 0.99992807f);
        return __uint_as_float(__float_as_uint(y) + (__float_as_uint(rounded) << 23));
    }
};
