#pragma once
// Bounds, both inclusive, of a value over a box of queries and keys; rawattn/trace/ranges.py is the same on the host. Of a bool: lo is
// "always", hi is "ever". Of a float: whether NaN is among the values besides. Integers fit 32 bits, which the host has proved.
#include "function/integer.cuh"
#include "function/number.cuh"

namespace function {
template <class T> struct Range { T lo, hi; };
template <> struct Range<float> {
    float lo, hi;
    bool nan;
};
using Ints = Range<i32>;
using Longs = Range<i64>;
using Floats = Range<float>;
using Truth = Range<bool>;

template <class T> __device__ inline Range<T> point(T x) { return {x, x}; }
__device__ inline Floats point(float x) { return x == x ? Floats{x, x, false} : Floats{inf(), -inf(), true}; }
template <class T> __device__ inline bool is_point(Range<T> a) { return a.lo == a.hi; }
__device__ inline bool is_point(Floats a) { return a.lo == a.hi && !a.nan; }
template <class T> __device__ inline Range<T> hull(Range<T> a, Range<T> b) { return {::min(a.lo, b.lo), ::max(a.hi, b.hi)}; }
__device__ inline Truth hull(Truth a, Truth b) { return {a.lo && b.lo, a.hi || b.hi}; }
__device__ inline Floats hull(Floats a, Floats b) { return {fminf(a.lo, b.lo), fmaxf(a.hi, b.hi), a.nan || b.nan}; }
__device__ inline Floats any_float() { return {-inf(), inf(), true}; }

__device__ inline Ints add(Ints a, Ints b) { return {a.lo + b.lo, a.hi + b.hi}; }
__device__ inline Ints scale(Ints a, i32 c) { return c < 0 ? Ints{a.hi * c, a.lo * c} : Ints{a.lo * c, a.hi * c}; }
// Of a product or a quotient, from those of the bounds.
__device__ inline Ints of_corners(i32 w, i32 x, i32 y, i32 z) { return {::min(::min(w, x), ::min(y, z)), ::max(::max(w, x), ::max(y, z))}; }
__device__ inline Floats of_corners(float w, float x, float y, float z) {
    return {fminf(fminf(w, x), fminf(y, z)), fmaxf(fmaxf(w, x), fmaxf(y, z)), false};
}
__device__ inline Ints imul(Ints a, Ints b) { return of_corners(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi); }
template <class T> __device__ inline T most(T a, T b) { return ::max(a < 0 ? -a : a, b < 0 ? -b : b); }
__device__ inline Ints floordiv(Ints a, Ints b) {
    if (b.lo <= 0 && b.hi >= 0) return {-most(a.lo, a.hi), most(a.lo, a.hi)};
    return of_corners(floordiv(a.lo, b.lo), floordiv(a.lo, b.hi), floordiv(a.hi, b.lo), floordiv(a.hi, b.hi));
}
__device__ inline Ints mod(Ints a, Ints b) {
    if (b.lo <= 0) {
        const i32 x = ::max(most(a.lo, a.hi), most(b.lo, b.hi));
        return {-x, x};
    }
    if (a.lo >= 0 && a.hi < b.lo) return a;
    if (is_point(b)) {
        const i32 q = floordiv(a.lo, b.lo);
        if (q == floordiv(a.hi, b.lo)) return {a.lo - q * b.lo, a.hi - q * b.lo};
    }
    return {0, b.hi - 1};
}
template <class T> __device__ inline Range<i32> saturate(Range<T> a) { return {saturate(a.lo), saturate(a.hi)}; }

// Bits, of 32 or 64. ones(x): all bits up to the highest one that a number as large as x or smaller has, be it negative or not.
template <class T> __device__ inline T ones(T x) {
    x = x < 0 ? ~x : x;
#pragma unroll
    for (int shift = 1; shift < int(sizeof(T)) * 8; shift *= 2) x |= x >> shift;
    return x;
}
template <class T> __device__ inline T ones(Range<T> a, Range<T> b) { return ones(a.lo) | ones(a.hi) | ones(b.lo) | ones(b.hi); }
template <class T> __device__ inline Range<T> low_bits(Range<T> a, T mask) {  // a & mask, whose bits are the lowest ones
    if ((a.lo & ~mask) == (a.hi & ~mask)) return {a.lo & mask, a.hi & mask};
    return {0, mask};
}
template <class T> __device__ inline Range<T> band(Range<T> a, Range<T> b) {
    if (is_point(b) && b.lo >= 0 && (b.lo & (b.lo + 1)) == 0) return low_bits(a, b.lo);
    if (is_point(a) && a.lo >= 0 && (a.lo & (a.lo + 1)) == 0) return low_bits(b, a.lo);
    if (is_point(a) && is_point(b)) return point(a.lo & b.lo);
    if (a.lo < 0 && b.lo < 0) return {~ones(a, b), ::max(a.hi, b.hi)};
    if (a.lo < 0) return {0, b.hi};
    if (b.lo < 0) return {0, a.hi};
    return {0, ::min(a.hi, b.hi)};
}
template <class T> __device__ inline Range<T> bor(Range<T> a, Range<T> b) {
    if (is_point(a) && is_point(b)) return point(a.lo | b.lo);
    return {a.lo < 0 || b.lo < 0 ? ~ones(a, b) : 0, ones(a, b)};
}
template <class T> __device__ inline Range<T> bxor(Range<T> a, Range<T> b) {
    if (is_point(a) && is_point(b)) return point(a.lo ^ b.lo);
    return {a.lo < 0 || b.lo < 0 ? ~ones(a, b) : 0, ones(a, b)};
}
template <class T, class By> __device__ inline Range<T> shr(Range<T> a, Range<By> by) {
    return {::min(a.lo >> by.lo, a.lo >> by.hi), ::max(a.hi >> by.lo, a.hi >> by.hi)};
}
template <class T, class By> __device__ inline Range<T> shl(Range<T> a, Range<By> by) {
    return {::min(a.lo << by.lo, a.lo << by.hi), ::max(a.hi << by.lo, a.hi << by.hi)};
}

// Floats, each operation rounded by itself: bounds of the operands bound it. Where infinities meet it may be NaN.
__device__ inline bool is_far(Floats a) { return a.lo == -inf() || a.hi == inf() || a.nan; }
__device__ inline Floats add(Floats a, Floats b) {
    return is_far(a) || is_far(b) ? any_float() : Floats{__fadd_rn(a.lo, b.lo), __fadd_rn(a.hi, b.hi), false};
}
__device__ inline Floats neg(Floats a) { return {-a.hi, -a.lo, a.nan}; }
__device__ inline Floats sub(Floats a, Floats b) { return add(a, neg(b)); }
__device__ inline Floats mul(Floats a, Floats b) {
    if (is_far(a) || is_far(b)) return any_float();
    return of_corners(__fmul_rn(a.lo, b.lo), __fmul_rn(a.lo, b.hi), __fmul_rn(a.hi, b.lo), __fmul_rn(a.hi, b.hi));
}
__device__ inline Floats div(Floats a, Floats b) {
    if (is_far(a) || is_far(b) || (b.lo <= 0 && b.hi >= 0)) return any_float();
    return of_corners(__fdiv_rn(a.lo, b.lo), __fdiv_rn(a.lo, b.hi), __fdiv_rn(a.hi, b.lo), __fdiv_rn(a.hi, b.hi));
}
// Of functions that rise, some units in the last place wider, since nobody promises that their roundings rise.
__device__ inline Floats wider(float lo, float hi, bool nan, float least = -inf(), float largest = inf()) {
    return {fmaxf(lo - fabsf(lo) * 1e-6f - 1e-37f, least), fminf(hi + fabsf(hi) * 1e-6f + 1e-37f, largest), nan};
}
__device__ inline Floats exp(Floats a) { return wider(exp(a.lo), exp(a.hi), a.nan, 0.f); }
__device__ inline Floats exp2(Floats a) { return wider(exp2(a.lo), exp2(a.hi), a.nan, 0.f); }
__device__ inline Floats log(Floats a) { return wider(log(fmaxf(a.lo, 0.f)), log(fmaxf(a.hi, 0.f)), a.nan || a.lo < 0); }
__device__ inline Floats log2(Floats a) { return wider(log2(fmaxf(a.lo, 0.f)), log2(fmaxf(a.hi, 0.f)), a.nan || a.lo < 0); }
__device__ inline Floats expm1(Floats a) { return wider(expm1(a.lo), expm1(a.hi), a.nan, -1.f); }
__device__ inline Floats log1p(Floats a) { return wider(log1p(fmaxf(a.lo, -1.f)), log1p(fmaxf(a.hi, -1.f)), a.nan || a.lo < -1); }
__device__ inline Floats pow(Floats a, Floats b) {  // of bases >= 0
    if (is_far(a) || is_far(b) || a.lo < 0 || (a.lo == 0 && b.lo < 0)) return any_float();
    const Floats r = of_corners(pow(a.lo, b.lo), pow(a.lo, b.hi), pow(a.hi, b.lo), pow(a.hi, b.hi));
    return wider(r.lo, r.hi, false, 0.f);
}
__device__ inline Floats sqrt(Floats a) { return wider(sqrt(fmaxf(a.lo, 0.f)), sqrt(fmaxf(a.hi, 0.f)), a.nan || a.lo < 0, 0.f); }
__device__ inline Floats tanh(Floats a) { return wider(tanh(a.lo), tanh(a.hi), a.nan, -1.f, 1.f); }
__device__ inline Floats erf(Floats a) { return wider(erf(a.lo), erf(a.hi), a.nan, -1.f, 1.f); }
__device__ inline Floats sin(Floats) { return {-1.f, 1.f, true}; }
__device__ inline Floats cos(Floats) { return {-1.f, 1.f, true}; }
__device__ inline Floats floor(Floats a) { return {floorf(a.lo), floorf(a.hi), a.nan}; }
__device__ inline Floats sign(Floats a) { return {sign(a.lo), sign(a.hi), a.nan}; }
__device__ inline Ints trunc(Floats a) {
    const Ints found{trunc(a.lo), trunc(a.hi)};
    return a.nan ? Ints{::min(found.lo, 0), ::max(found.hi, 0)} : found;
}

template <class T> __device__ inline Range<T> min(Range<T> a, Range<T> b) { return {::min(a.lo, b.lo), ::min(a.hi, b.hi)}; }
template <class T> __device__ inline Range<T> max(Range<T> a, Range<T> b) { return {::max(a.lo, b.lo), ::max(a.hi, b.hi)}; }
// They pass over NaN.
__device__ inline Floats passed(Floats found, Floats a, Floats b) {
    if (!a.nan && !b.nan) return found;
    found = hull(found, hull(a, b));
    found.nan = a.nan && b.nan;
    return found;
}
__device__ inline Floats min(Floats a, Floats b) { return passed({fminf(a.lo, b.lo), fminf(a.hi, b.hi), false}, a, b); }
__device__ inline Floats max(Floats a, Floats b) { return passed({fmaxf(a.lo, b.lo), fmaxf(a.hi, b.hi), false}, a, b); }
__device__ inline Ints abs(Ints a) {
    const i32 x = abs(a.lo), y = abs(a.hi);
    return {a.lo < 0 && a.hi > 0 ? 0 : ::min(x, y), ::max(x, y)};
}
__device__ inline Floats abs(Floats a) {
    const float x = fabsf(a.lo), y = fabsf(a.hi);
    return {a.lo < 0 && a.hi > 0 ? 0.f : fminf(x, y), fmaxf(x, y), a.nan};
}
template <class To, class T> __device__ inline Range<To> cast(Range<T> a) { return {To(a.lo), To(a.hi)}; }

// Conditions. A comparison with NaN is false.
template <class T> __device__ inline bool has_nan(Range<T>) { return false; }
__device__ inline bool has_nan(Floats a) { return a.nan; }
template <class T> __device__ inline Truth lt(Range<T> a, Range<T> b) { return {a.hi < b.lo && !has_nan(a) && !has_nan(b), a.lo < b.hi}; }
template <class T> __device__ inline Truth le(Range<T> a, Range<T> b) { return {a.hi <= b.lo && !has_nan(a) && !has_nan(b), a.lo <= b.hi}; }
template <class T> __device__ inline Truth eq(Range<T> a, Range<T> b) {
    return {is_point(a) && is_point(b) && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi};
}
__device__ inline Truth both(Truth a, Truth b) { return {a.lo && b.lo, a.hi && b.hi}; }
__device__ inline Truth either(Truth a, Truth b) { return {a.lo || b.lo, a.hi || b.hi}; }
__device__ inline Truth opposite(Truth a) { return {!a.hi, !a.lo}; }
__device__ inline Truth differ(Truth a, Truth b) {
    const bool known = is_point(a) && is_point(b);
    return {known && a.lo != b.lo, !known || a.lo != b.lo};
}
template <class T> __device__ inline Range<T> choose(Truth c, Range<T> a, Range<T> b) {
    if (c.lo) return a;
    return c.hi ? hull(a, b) : b;
}
}  // namespace function
