#pragma once
// logit = softcap * tanh(scale * s / softcap).
#include "ptx/base.cuh"

struct Softcap {
    Number scale_log2, inner_log2;

    __device__ explicit Softcap(const Args& args)
        : scale_log2(max(args.softcap * Number(1.4426950408889634), Number(1.2e-38))),
          inner_log2(Number(2.8853900817779268) * args.scale * ptx::reciprocal(args.softcap)) {}

    // tanh(x) = 1 - 2 / (exp(2x) + 1). tanh.approx is one instruction instead of two, but its error of 2^-11, times a cap of 30,
    // is more than the rounding of a half-precision logit.
    __device__ Number operator()(Number s, i32, i32) const {
        return 1 - 2 * ptx::reciprocal(ptx::exp2(s * inner_log2) + 1);
    }
};
