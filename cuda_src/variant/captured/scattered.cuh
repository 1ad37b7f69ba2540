#pragma once
// The gradient of an array whose element follows from the dot product: each pair's is added to the element's exact sum, by
// variant/captured/matching.cuh.
#include "variant/captured/matching.cuh"

struct Scattered {
    struct Shared {};

    __device__ Scattered(const Args& args, Shared&) : args(args) {}

    template <class Row>
    __device__ void add(int, const Number (&x)[Layout::keys], const Number (&s)[Layout::keys], const Row& row, const Gradient&, const PairRow&) {
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) add_matching(args, row.element(s[j], Layout::offset(j)), x[j]);
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {}
    __device__ void finish(const Gradient&, const Rows&, i32) {}

   private:
    const Args& args;
};
