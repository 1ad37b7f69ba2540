#pragma once
// The gradient of an array with an element for each query and key: each pair's is added by the thread that has the pair, for one
// sequence and head after the other (variant/scheduler/shared_tiles.cuh). So nothing is added at once, and the order is always one.
#include "variant/pair_row.cuh"

struct OfPairs {
    struct Shared {};

    __device__ OfPairs(const Args& args, Shared&) : args(args) {}

    template <class Row>
    __device__ void add(int, const Number (&x)[Layout::keys], const Number (&)[Layout::keys], const Row& row, const Gradient&, const PairRow& at) {
        const i64 element = row.element(0, 0), step = row.element(0, 1) - element;  // no index but one knows the key
        if (at.count > 0) Sums::add_row(args, x, element, step, at.count);
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {}
    __device__ void finish(const Gradient&, const Rows&, i32) {}

   private:
    const Args& args;
};
