#pragma once
// Which queries are rotated, and where they go.
#include "tile/strided_tensor.cuh"

// Those of q, where they lie ...
struct QueriesInPlace {
    static constexpr int first_column = 0;  // of a head that rows have
    i32 heads;

    template <class A>
    __device__ QueriesInPlace(const A& args) : heads(args.heads) {}
    template <class A>
    __device__ const StridedTensor& from(const A& args) const { return args.q; }
    template <class A>
    __device__ const StridedTensor& to(const A& args) const { return args.q; }
};
// ... or to an array of their own.
struct QueriesApart : QueriesInPlace {
    using QueriesInPlace::QueriesInPlace;
    template <class A>
    __device__ const StridedTensor& to(const A& args) const { return args.q_out; }
};
// No queries are rotated.
struct NoQueries {
    static constexpr i32 heads = 0;
    static constexpr int first_column = 0;

    __device__ NoQueries(const Args&) {}
    __device__ const StridedTensor& from(const Args& args) const { return args.k; }
    __device__ const StridedTensor& to(const Args& args) const { return args.k; }
};
