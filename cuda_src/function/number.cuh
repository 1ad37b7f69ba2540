#pragma once
// Functions of floats. Those of `float` that a mask calls are the accurate ones; scores call one instruction where there is one, by
// the names exp2, log2 and reciprocal.
#include "ptx/base.cuh"

namespace function {
__device__ inline float inf() { return __builtin_bit_cast(float, 0x7f800000u); }
__device__ inline float nan() { return __builtin_bit_cast(float, 0x7fc00000u); }

__device__ inline float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ inline float reciprocal(float x) { return ptx::reciprocal(x); }
__device__ inline double reciprocal(double x) { return 1 / x; }
__device__ inline float abs(float x) { return fabsf(x); }
__device__ inline double abs(double x) { return fabs(x); }
__device__ inline float exp(float x) { return expf(x); }
__device__ inline double exp(double x) { return ::exp(x); }
__device__ inline float exp2(float x) { return exp2f(x); }
__device__ inline double exp2(double x) { return ::exp2(x); }
__device__ inline float expm1(float x) { return expm1f(x); }
__device__ inline double expm1(double x) { return ::expm1(x); }
__device__ inline float pow(float x, float y) { return powf(x, y); }
__device__ inline double pow(double x, double y) { return ::pow(x, y); }
__device__ inline float log1p(float x) { return log1pf(x); }
__device__ inline double log1p(double x) { return ::log1p(x); }
__device__ inline float log(float x) { return logf(x); }
__device__ inline double log(double x) { return ::log(x); }
__device__ inline float log2(float x) { return log2f(x); }
__device__ inline double log2(double x) { return ::log2(x); }
__device__ inline float tanh(float x) { return tanhf(x); }
__device__ inline double tanh(double x) { return ::tanh(x); }
__device__ inline float sqrt(float x) { return __fsqrt_rn(x); }
__device__ inline double sqrt(double x) { return ::sqrt(x); }
__device__ inline float sin(float x) { return sinf(x); }
__device__ inline double sin(double x) { return ::sin(x); }
__device__ inline float cos(float x) { return cosf(x); }
__device__ inline double cos(double x) { return ::cos(x); }
__device__ inline float erf(float x) { return erff(x); }
__device__ inline double erf(double x) { return ::erf(x); }
__device__ inline float floor(float x) { return floorf(x); }
__device__ inline double floor(double x) { return ::floor(x); }
template <class T> __device__ inline T sign(T x) { return x != x ? x : T((x > 0) - (x < 0)); }

// One instruction for float.
__device__ inline float fast_exp2(float x) { return ptx::exp2(x); }
__device__ inline double fast_exp2(double x) { return ::exp2(x); }
__device__ inline float fast_log2(float x) { return __log2f(x); }
__device__ inline double fast_log2(double x) { return ::log2(x); }

// Of those, a few for float. Near 0, where a sum with 1 would lose digits, they are polynomials.
__device__ inline float fast_expm1(float x) {
    const float near = x * (1 + x * (1 / 2.f + x * (1 / 6.f + x * (1 / 24.f))));
    return fabsf(x) < 1 / 16.f ? near : fast_exp2(x * 1.4426950408889634f) - 1;
}
__device__ inline double fast_expm1(double x) { return ::expm1(x); }
__device__ inline float fast_log1p(float x) {
    const float near = x * (1 - x * (1 / 2.f - x * (1 / 3.f - x * (1 / 4.f))));
    return fabsf(x) < 1 / 32.f ? near : fast_log2(1 + x) * 0.6931471805599453f;
}
__device__ inline double fast_log1p(double x) { return ::log1p(x); }
// C's pow, but for the sign of 0, and infinite powers of 1. The fast logarithm has an absolute error near 1, which long distances raise.
__device__ inline float fast_pow(float x, float y) {
    const float size = fast_exp2(y * log2f(fabsf(x)));
    const bool is_whole = floorf(y) == y, is_even = floorf(y / 2) == y / 2;
    if (y == 0) return 1;
    return x >= 0 || is_even ? size : is_whole ? -size
                                               : nan();
}
__device__ inline double fast_pow(double x, double y) { return ::pow(x, y); }
}  // namespace function
