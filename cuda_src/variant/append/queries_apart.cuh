#pragma once
// Rotated queries go to an array of their own.
#include "tile/strided_tensor.cuh"

struct QueriesApart {
    i32 heads;

    __device__ QueriesApart(const Args& args) : heads(args.heads) {}
    __device__ const StridedTensor& from(const Args& args) const { return args.q; }
    __device__ const StridedTensor& to(const Args& args) const { return args.q_out; }
};
