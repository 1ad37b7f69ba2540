#pragma once
// logit = softcap * tanh(scale * s / softcap).
#include "tile/log_sum.cuh"
#include "variant/work_tile.cuh"

// One by one, in the same time for every value.
struct ConstantTimeSoftcap {
    Number scale_log2, twice;  // twice * s is 2 x, where x is what tanh is taken of

    __device__ ConstantTimeSoftcap(const Args& args, const Rows&, const WorkTile&)
        : scale_log2(max(args.softcap * Number(log2_e), Limits<Number>::least)), twice(2 * args.scale * ptx::reciprocal(args.softcap)) {}

    __device__ Number operator()(Number s, i32, i32) const {
        const Number y = s * to_y(), far = tanh_of_half(s * twice), near = tanh_near(y);
        return is_far(y) ? far : near;
    }
    __device__ Number derivative(Number s, i32 q, i32 kv) const {
        const Number t = (*this)(s, q, kv);
        return 1 - t * t;
    }

    // tanh(x) = 1 - 2 / (exp(2x) + 1). tanh.approx is one instruction instead of two, but its error of 2^-11, times a cap of 30,
    // is more than the rounding of a half-precision logit.
    __device__ static Number tanh_of_half(Number y) {
        return 1 - 2 * ptx::reciprocal(ptx::exp2(y * Number(log2_e)) + 1);
    }
    // That difference loses the digits of a small x, and a large cap makes all x small. For |x| < 0.75 an odd polynomial of degree 9
    // in y = x / 0.375 has a relative error of 5.7e-7, in multiplications only.
    __device__ static Number tanh_near(Number y) {
        const Number w = y * y;
        Number p = w * Number(1.8961277419e-6) + Number(-5.2200859499e-5);
        p = w * p + Number(9.83255915344e-4);
        p = w * p + Number(-0.0175754446536303);
        return y * (w * p + Number(0.374999791383743));
    }
    __device__ Number to_y() const { return twice / Number(0.75); }
    // The other y are those above 2, whose exponent has its highest bit set, and what is no number.
    __device__ static u32 exponent_of(float y) { return __builtin_bit_cast(u32, y); }
    __device__ static bool is_far(Number y) { return exponent_of(float(y)) & 0x40000000u; }
};

// Logits within a quarter of the cap need no exponential: for |x| < 0.25 an odd polynomial of degree 5 has a minimax error of 4.9e-8.
// It is taken in t = s^2 - limit, whose sign says whether it may be. Logits that are wanted themselves are made eight of each of a
// warp's threads at once, without exponentials where all of them are near.
struct Softcap : ConstantTimeSoftcap {
    float limit, c0, c1, c2;

    __device__ Softcap(const Args& args, const Rows& rows, const WorkTile& work) : ConstantTimeSoftcap(args, rows, work) {
        constexpr float a0 = 0.99999863f, a1 = -0.33315702f, a2 = 0.12762232f, reach = 0.0625f;
        const float x = twice / 2, x2 = x * x;
        c0 = scale_log2 * x * (a0 + reach * (a1 + reach * a2));
        c1 = scale_log2 * x * x2 * (a1 + 2 * reach * a2);
        c2 = scale_log2 * x * x2 * x2 * a2;
        limit = c2 > 1e-36f && c2 < 1e36f ? reach / x2 : -1.f;
    }

    // To the last place, also of small logits.
    __device__ Number operator()(Number s, i32, i32) const { return tanh(s * (twice / 2)); }

    __device__ Number derivative(Number s, i32 q, i32 kv) const {
        const Number t = sizeof(Number) == 8 ? (*this)(s, q, kv) : ConstantTimeSoftcap::operator()(s, q, kv);
        return 1 - t * t;
    }

    __device__ float exponent(float s, float less, u32& within) const {
        const float t = __fmaf_rn(s, s, -limit);
        within &= __builtin_bit_cast(u32, t);
        return __fmaf_rn(s, __fmaf_rn(t, __fmaf_rn(t, c2, c1), c0), less);
    }

    template <int n>
    __device__ void apply(float (&s)[n]) const {
        const float to_y = this->to_y();
#pragma unroll
        for (int i = 0; i < n; i += 8) {
            u32 exponents = 0;
            float y[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) y[j] = s[i + j] * to_y, exponents |= exponent_of(y[j]);
            if (__any_sync(0xffffffffu, exponents & 0x40000000u)) {
#pragma unroll
                for (int j = 0; j < 8; ++j) s[i + j] = is_far(y[j]) ? tanh_of_half(s[i + j] * twice) : tanh_near(y[j]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) s[i + j] = tanh_near(y[j]);
            }
        }
    }
};
