#pragma once
// Eight bits: a sign, five of exponent and two of fraction, the upper half of a number of half precision. E5M2 of
// https://arxiv.org/abs/2209.05433.
#include "variant/element/byte_operands.cuh"

struct E5m2 {
    using Number = float;
    using Operands = ByteOperands<E5m2>;
    static constexpr float largest = 57344;
    unsigned char bits;

    // Numbers 0 and 1, and 2 and 3, of a word as halves; numbers 0 and 2, and 1 and 3.
    __device__ static void pairs_of_k(u32 (&halves)[2], u32 word) {
        halves[0] = __byte_perm(word, 0, 0x1404), halves[1] = __byte_perm(word, 0, 0x3424);
    }
    __device__ static void pairs_of_v(u32 (&halves)[2], u32 word) { halves[0] = __byte_perm(word, 0, 0x2404), halves[1] = word & 0xff00ff00; }

    __device__ static float widen(E5m2 x) {
        const u32 size = x.bits & 0x7f, sign = u32(x.bits & 0x80) << 24, special = 0x7f800000 | size << 21;
        return __uint_as_float((size >= 0x7c ? special : __float_as_uint(__uint_as_float(size << 21) * 0x1p112f)) | sign);
    }
    // To nearest even; what is larger than the largest number becomes that one, infinity too.
    __device__ static E5m2 narrow(float x) {
        const u32 sign = __float_as_uint(x) >> 31 << 7;
        const float y = min(__uint_as_float(__float_as_uint(x) & 0x7fffffff), largest);
        const u32 bits = __float_as_uint(y), rounded = (bits + 0xfffff + (bits >> 21 & 1) >> 21) - (112 << 2);
        const u32 subnormal = __float_as_uint(y + 128.f) - __float_as_uint(128.f);  // of which the last place is 2^-16
        const u32 size = y < 0x1p-14f ? subnormal : rounded;
        return {(unsigned char)(sign | (x != x ? 0x7f : size))};
    }
};
