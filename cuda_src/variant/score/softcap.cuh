#pragma once
// logit = softcap * tanh(scale * s / softcap).
#include "ptx/base.cuh"

struct Softcap {
    float scale_log2, inner_log2;

    __device__ explicit Softcap(const Args& args)
        : scale_log2(fmaxf(args.softcap * 1.44269504f, 1.2e-38f)), inner_log2(2.88539008f * args.scale * ptx::reciprocal(args.softcap)) {}

    // tanh(x) = 1 - 2 / (exp(2x) + 1). tanh.approx is one instruction instead of two, but its error of 2^-11, times a cap of 30,
    // is more than the rounding of a half-precision logit.
    __device__ float operator()(float s, i32, i32) const {
        return __fmaf_rn(-2.f, ptx::reciprocal(ptx::exp2(s * inner_log2) + 1.f), 1.f);
    }
};
