#pragma once
// The statistics of 16 queries lie as a quad needs them: its first lane's four, in the two blocks of eight, then its next lane's. So a
// thread reads four at once, and there are half as many reads.
#include "ptx/base.cuh"

struct StatisticsByQuads {
    const float* const first;  // of this thread, of a step's
    float4 both;

    __device__ StatisticsByQuads(const float* of_step, u32 lane) : first(of_step + lane % 4 * 4) {}

    __device__ static i32 place(i32 row) { return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2; }
    // Of the queries of elements i and i + 1 of a transposed product, of which the first four of each eight come first.
    __device__ float2 operator()(int i) {
        if (i % 8 == 0) both = *reinterpret_cast<const float4*>(first + i / 8 * 16);
        return i % 8 == 0 ? float2{both.x, both.y} : float2{both.z, both.w};
    }
};
static_assert(cfg::tile_q % 16 == 0);
