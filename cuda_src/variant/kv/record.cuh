#pragma once
// A record of 656 bytes: 512 numbers in e4m3, KvElement, a float32 scale for each 128 of them, and 64 numbers in bf16.
#include "ptx/base.cuh"

struct Record {
    static constexpr u32 numbers = 512, scales = 4 * sizeof(float), rest = 128;  // bytes
    static constexpr u32 tail = scales + rest, bytes = numbers + tail;
    static_assert(cfg::head_dim == 576 && cfg::head_dim_v == 512);

    // Four numbers times their scale, rounded once.
    __device__ static uint2 scaled(u32 four, float scale) {
        float x[4];
        KvElement::widen(x, four);
        return make_uint2(Element::pack(x[0] * scale, x[1] * scale), Element::pack(x[2] * scale, x[3] * scale));
    }
    __device__ static uint4 scaled(uint2 eight, float scale) {
        const uint2 low = scaled(eight.x, scale), high = scaled(eight.y, scale);
        return make_uint4(low.x, low.y, high.x, high.y);
    }
    __device__ static u32 of_bf16(u32 two) { return Element::pack(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000)); }
    __device__ static uint4 of_bf16(uint4 eight) { return make_uint4(of_bf16(eight.x), of_bf16(eight.y), of_bf16(eight.z), of_bf16(eight.w)); }
};
