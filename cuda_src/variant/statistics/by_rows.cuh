#pragma once
// The statistics of a tile's queries lie as the rows do: a thread reads two at once.
#include "tile/fragment.cuh"

struct StatisticsByRows {
    const float* const first;  // of this thread, of a step's

    __device__ StatisticsByRows(const float* of_step, u32 lane) : first(of_step + lane % 4 * 2) {}

    __device__ static i32 place(i32 row) { return row; }
    // Of the queries of elements i and i + 1 of a transposed product.
    __device__ float2 operator()(int i) { return *reinterpret_cast<const float2*>(first + fragment_column(i)); }
};
