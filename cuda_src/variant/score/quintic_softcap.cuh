#pragma once
// Softcap for a softmax without a reference (variant/softmax/unshifted.cuh), for positive logits within 0.28 of the cap: tanh(x) is
// x (a0 + a1 x^2 + a2 x^4), with a relative error of 7.8e-7 there. In t = unit * s it is t ((t^2 + a)^2 + b): four instructions, each of
// which has one constant. It increases everywhere. So a large weight shows a dot product that is too large, and those that are too
// small have small weights, whose error is bounded: a row that weighs args.softcap_least for each key errs by 2^-18 of its sum by it, and o
// by 2^-18 of the largest value of a key that it keeps, however light that key is. Weights of 2^30 leave values up to 2^80.
#include "variant/score/softcap.cuh"

struct QuinticSoftcap : Softcap {
    float unit, a, b;
    float least, most;  // what a row must weigh, and what a thread's part of a tile may

    __device__ QuinticSoftcap(const Args& args, const Rows& rows, const WorkTile& work) : Softcap(args, rows, work) {
        constexpr float a0 = 0.99999923f, a1 = -0.33315523f, a2 = 0.12720917f, at_reach = 0.27290508f;  // tanh(0.28)
        const float g = ptx::exp2(__log2f(scale_log2 * a2) * 0.2f), per = ptx::reciprocal(g);
        unit = uniform(twice / 2 * g), a = uniform(scale_log2 * (a1 / 2) * per * per * per), b = uniform(scale_log2 * a0 * per - a * a);
        least = fmaxf(args.softcap_least * rows.kv_len, 0x1p-40f), most = ptx::exp2(fminf(scale_log2 * at_reach, 30.f));
    }

    // In a uniform register each, as vector registers are read by products and by everything else.
    __device__ static float uniform(float x) { return __builtin_bit_cast(float, ptx::uniform(__builtin_bit_cast(u32, x))); }

    // The weight's exponent, straight from the dot product.
    __device__ float exponent(float s) const {
        const float t = s * unit, u = __fmaf_rn(t, t, a);
        return t * __fmaf_rn(u, u, b);
    }
};
