#pragma once
// No queries are rotated.
#include "tile/strided_tensor.cuh"

struct NoQueries {
    static constexpr i32 heads = 0;

    __device__ NoQueries(const Args& args) {}
    __device__ const StridedTensor& from(const Args& args) const { return args.k; }
    __device__ const StridedTensor& to(const Args& args) const { return args.k; }
};
