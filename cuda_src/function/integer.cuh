#pragma once
// Integers of functions of queries and keys: quotients rounded down, and indices and elements brought to where they may be.
#include "ptx/base.cuh"

namespace function {
constexpr i32 loaded = 1 << 28;  // sums of several integers up to here fit 32 bits

template <class T> __device__ inline i32 saturate(T x) { return i32(::max(T(-loaded), ::min(x, T(loaded)))); }
__device__ inline i32 trunc(float x) { return i32(fminf(fmaxf(x, float(-loaded)), float(loaded)) * float(x == x)); }  // NaN is 0
__device__ inline i32 trunc(double x) { return x == x ? i32(fmin(fmax(x, double(-loaded)), double(loaded))) : 0; }
template <class T> __device__ inline i32 inside(T i, i32 n) { return i32(::max(T(0), ::min(i, T(n - 1)))); }
__device__ inline i32 abs(i32 x) { return x < 0 ? -x : x; }
// Whether |x| <= n, by one comparison; the sums may wrap around.
__device__ inline bool within(i32 x, i32 n) { return u32(x) + u32(n) < (n < 0 ? 0 : 2 * u32(n) + 1); }

// A divisor from the host: x / |value| is 2 x * multiplier >> 32 + shift for 0 <= x < 2^31, without a branch, as many elements ask
// for quotients. The multiplier of 0 is 0.
struct Divisor {
    i32 value;
    u32 multiplier;
    i32 shift;
};
// floordiv rounds down, udiv is the same of numbers >= 0; by 0 both are 0.
__device__ inline i32 udiv(i32 x, i32 d) { return d == 0 ? 0 : i32(u32(x) / u32(d)); }
__device__ inline i32 floordiv(i32 x, i32 d) {
    if (d == 0) return 0;
    const i32 q = x / d;
    return q - ((x % d != 0) & ((x < 0) != (d < 0)));
}
__device__ inline i32 udiv(i32 x, const Divisor& d) { return i32(__umulhi(2 * u32(x), d.multiplier) >> d.shift); }
__device__ inline i32 floordiv(i32 x, const Divisor& d) {
    const i32 y = d.value < 0 ? -x : x, sign = d.value == 0 ? 0 : y >> 31;
    return udiv(y ^ sign, d) ^ sign;
}
}  // namespace function
