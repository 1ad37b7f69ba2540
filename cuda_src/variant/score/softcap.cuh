#pragma once
// logit = softcap * tanh(scale * s / softcap).
#include "ptx/base.cuh"

// One by one, in the same time for every value.
struct SteadySoftcap {
    Number scale_log2, twice;  // twice * s is 2 x, where x is what tanh is taken of

    __device__ explicit SteadySoftcap(const Args& args)
        : scale_log2(max(args.softcap * Number(1.4426950408889634), Number(1.2e-38))),
          twice(2 * args.scale * ptx::reciprocal(args.softcap)) {}

    __device__ Number operator()(Number s, i32, i32) const { return tanh_of_half(s * twice); }

    // tanh(x) = 1 - 2 / (exp(2x) + 1). tanh.approx is one instruction instead of two, but its error of 2^-11, times a cap of 30,
    // is more than the rounding of a half-precision logit.
    __device__ static Number tanh_of_half(Number y) {
        return 1 - 2 * ptx::reciprocal(ptx::exp2(y * Number(1.4426950408889634)) + 1);
    }
};

// A warp's logits at once. Those well within the cap, as nearly all are, need no exponential: for |x| < 0.75 an odd polynomial,
// of minimax error 1.9e-7, takes multiplications only. In y = x / 0.375 the others are those above 2, whose exponent has its
// highest bit set, and what is no number.
struct Softcap : SteadySoftcap {
    using SteadySoftcap::SteadySoftcap;

    template <int n>
    __device__ void apply(float (&s)[n]) const {
        const float to_y = twice / 0.75f;
        u32 exponents = 0;
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] *= to_y, exponents |= __builtin_bit_cast(u32, s[i]);
        if (__any_sync(0xffffffffu, exponents & 0x40000000u)) {
#pragma unroll
            for (int i = 0; i < n; ++i) s[i] = tanh_of_half(s[i] * 0.75f);
            return;
        }
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float w = s[i] * s[i];
            float p = __fmaf_rn(w, 1.80655452e-6f, -5.13917672e-5f);
            p = __fmaf_rn(w, p, 9.80816743e-4f);
            p = __fmaf_rn(w, p, -1.75727161e-2f);
            s[i] *= __fmaf_rn(w, p, 0.374998961f);
        }
    }
};
