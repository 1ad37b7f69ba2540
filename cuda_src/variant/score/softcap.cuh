#pragma once
// logit = softcap * tanh(scale * s / softcap).
#include "ptx/base.cuh"

// One by one, in the same time for every value.
struct ConstantTimeSoftcap {
    Number scale_log2, twice;  // twice * s is 2 x, where x is what tanh is taken of

    __device__ explicit ConstantTimeSoftcap(const Args& args)
        : scale_log2(max(args.softcap * Number(1.4426950408889634), Number(1.2e-38))),
          twice(2 * args.scale * ptx::reciprocal(args.softcap)) {}

    __device__ Number operator()(Number s, i32, i32) const { return tanh_of_half(s * twice); }
    __device__ Number derivative(Number, Number t, i32, i32) const { return 1 - t * t; }

    // tanh(x) = 1 - 2 / (exp(2x) + 1). tanh.approx is one instruction instead of two, but its error of 2^-11, times a cap of 30,
    // is more than the rounding of a half-precision logit.
    __device__ static Number tanh_of_half(Number y) {
        return 1 - 2 * ptx::reciprocal(ptx::exp2(y * Number(1.4426950408889634)) + 1);
    }
};

// Logits within a quarter of the cap need no exponential: for |x| < 0.25 an odd polynomial of degree 5 has a minimax error of 4.9e-8.
// It is taken in t = s^2 - limit, whose sign says whether it may be.
//
// Logits that are wanted themselves, eight of each of a warp's threads at once: for |x| < 0.75 an odd polynomial of degree 9, of
// minimax error 1.9e-7, takes multiplications only. In y = x / 0.375 the others are those above 2, whose exponent has its highest
// bit set, and what is no number.
struct Softcap : ConstantTimeSoftcap {
    float limit, c0, c1, c2;

    __device__ explicit Softcap(const Args& args) : ConstantTimeSoftcap(args) {
        constexpr float a0 = 0.99999863f, a1 = -0.33315702f, a2 = 0.12762232f, reach = 0.0625f;
        const float x = twice / 2, x2 = x * x;
        c0 = scale_log2 * x * (a0 + reach * (a1 + reach * a2));
        c1 = scale_log2 * x * x2 * (a1 + 2 * reach * a2);
        c2 = scale_log2 * x * x2 * x2 * a2;
        limit = c2 > 1e-36f && c2 < 1e36f ? reach / x2 : -1.f;
    }

    // To the last place, also of small logits.
    __device__ Number operator()(Number s, i32, i32) const { return tanh(s * (twice / 2)); }

    __device__ float exponent(float s, float less, u32& within) const {
        const float t = __fmaf_rn(s, s, -limit);
        within &= __builtin_bit_cast(u32, t);
        return __fmaf_rn(s, __fmaf_rn(t, __fmaf_rn(t, c2, c1), c0), less);
    }

    template <int n>
    __device__ void apply(float (&s)[n]) const {
        const float to_y = twice / 0.75f;
#pragma unroll
        for (int i = 0; i < n; i += 8) {
            u32 exponents = 0;
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = s[i + j] * to_y, exponents |= __builtin_bit_cast(u32, y[j]);
            if (__any_sync(0xffffffffu, exponents & 0x40000000u)) {
#pragma unroll
                for (int j = 0; j < 8; ++j) s[i + j] = tanh_of_half(s[i + j] * twice);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float w = y[j] * y[j];
                    float p = __fmaf_rn(w, 1.80655452e-6f, -5.13917672e-5f);
                    p = __fmaf_rn(w, p, 9.80816743e-4f);
                    p = __fmaf_rn(w, p, -1.75727161e-2f);
                    s[i + j] = y[j] * __fmaf_rn(w, p, 0.374998961f);
                }
            }
        }
    }
};
