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
}  // namespace function
