#pragma once
// Sums that are the same bits in whatever order numbers are added, by any threads of any blocks: every number is added exactly, as an
// integer. A sum is a row of words of 64 bits, each of which counts units of one size, 2^`bits` times those of the word before, from
// the smallest number of the format on: a superaccumulator (Kulisch; Neal, arXiv 1505.05571). A number falls into two or three words,
// as pieces of less than 2^`bits`, or a few times that, so a word cannot overflow before `most` numbers were added. One more word
// says which numbers were added that are none. `rounded` gives the sum as a number, within two units in its last place.
#include "ptx/base.cuh"

template <class T> struct ExactFormat;
template <> struct ExactFormat<float> {
    static constexpr int mantissa = 23, words = 12, bits = 24, least = -149;
    static constexpr i64 most = i64(1) << 39;
    __device__ static u64 bits_of(float x) { return __builtin_bit_cast(u32, x); }
};
template <> struct ExactFormat<double> {
    static constexpr int mantissa = 52, words = 67, bits = 32, least = -1074;
    static constexpr i64 most = i64(1) << 29;
    __device__ static u64 bits_of(double x) { return __builtin_bit_cast(u64, x); }
};

template <class T>
struct ExactSum : ExactFormat<T> {
    using F = ExactFormat<T>;
    static constexpr int size = F::words + 1;  // of a sum, in words of 64 bits
    static constexpr u64 mask = (u64(1) << F::bits) - 1, nan = 1, plus_inf = 2, minus_inf = 4;

    __device__ static void add(u64* sum, T x) {
        constexpr int exponents = (sizeof(T) == 4 ? 255 : 2047);
        const u64 bits = F::bits_of(x), fraction = bits & ((u64(1) << F::mantissa) - 1);
        const int exponent = int(bits >> F::mantissa) & exponents;
        const bool negative = bits >> (8 * sizeof(T) - 1);
        if (exponent == exponents) {
            atomicOr(sum + F::words, fraction ? nan : negative ? minus_inf
                                                               : plus_inf);
            return;
        }
        const u64 significand = fraction | u64(exponent > 0) << F::mantissa;
        if (significand == 0) return;
        const int place = max(exponent, 1) - 1, shift = place % F::bits;  // x = significand * 2^(place + least)
        u64* const word = sum + place / F::bits;
        const u64 low = (significand & mask) << shift, high = (significand >> F::bits) << shift;
        add(word, low & mask, negative);
        add(word + 1, (low >> F::bits) + (high & mask), negative);
        add(word + 2, high >> F::bits, negative);
    }
    __device__ static T rounded(const u64* sum) {
        const u64 strange = sum[F::words];
        if (strange) return T(strange == plus_inf ? infinity() : strange == minus_inf ? -infinity()
                                                                                      : not_a_number());
        const bool negative = carried(sum, 1, [](int, u64) {}) < 0;
        double found = 0;
        const i64 rest = carried(sum, negative ? -1 : 1, [&](int i, u64 digit) { found += ldexp(double(digit), F::bits * i + F::least); });
        found += ldexp(double(rest), F::bits * F::words + F::least);
        return T(negative ? -found : found);
    }

   private:
    __device__ static double infinity() { return __builtin_bit_cast(double, u64(0x7ff0000000000000)); }
    __device__ static double not_a_number() { return __builtin_bit_cast(double, u64(0x7ff8000000000000)); }
    __device__ static void add(u64* word, u64 piece, bool negative) {
        if (piece) atomicAdd(word, negative ? u64(0) - piece : piece);
    }
    // Gives each digit of sign * sum, from the lowest one on, and what is above them.
    template <class Give>
    __device__ static i64 carried(const u64* sum, i64 sign, Give give) {
        i64 carry = 0;
#pragma unroll 1
        for (int i = 0; i < F::words; ++i) {
            carry += sign * i64(sum[i]);
            give(i, u64(carry) & mask);
            carry >>= F::bits;
        }
        return carry;
    }
};
