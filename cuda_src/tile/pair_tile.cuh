#pragma once
// A bias of pairs, 64 rows by 64 columns, in log2 units: in the order in which the 128 threads of a warpgroup hold the accumulators of a product of
// that size (tile/fragment.cuh), four at a time. It is -inf where there is no such query or key.
#include "ptx/base.cuh"

struct alignas(128) PairTile {
    static constexpr int side = 64, floats = side * side, bytes = 4 * floats, each = floats / 128;  // of a thread
    float data[floats];

    // The place of a thread's elements i to i + 3, i a multiple of four.
    __device__ static constexpr int place(int i, u32 thread) { return i * 128 + int(thread) * 4; }
    __device__ static constexpr i32 count(i32 rows) { return (rows + side - 1) / side; }
    __device__ void get(float (&x)[each], u32 thread) const {
#pragma unroll
        for (int i = 0; i < each; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(data + place(i, thread));
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    }
    __device__ void put(const float (&x)[each], u32 thread) {
#pragma unroll
        for (int i = 0; i < each; i += 4)
            *reinterpret_cast<float4*>(data + place(i, thread)) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
};
