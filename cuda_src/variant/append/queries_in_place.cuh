#pragma once
// Queries are rotated where they lie.
#include "tile/strided_tensor.cuh"

struct QueriesInPlace {
    i32 heads;

    __device__ QueriesInPlace(const Args& args) : heads(args.heads) {}
    __device__ const StridedTensor& from(const Args& args) const { return args.q; }
    __device__ const StridedTensor& to(const Args& args) const { return args.q; }
};
