#pragma once
// The gradient of an array whose element follows from the query and not from the key: a row's pairs are added in one order, tile by
// tile, and the row's sum is added to the element's exact sum.
#include "tile/lane_sum.cuh"
#include "variant/pair_row.cuh"

struct OfRows {
    struct Shared {};

    __device__ OfRows(const Args& args, Shared&) : args(args) {}

    template <class Row>
    __device__ void add(int i, const Number (&x)[Layout::keys], const Number (&)[Layout::keys], const Row&, const Gradient&, const PairRow&) {
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) tile[i] += x[j];
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {
#pragma unroll
        for (int i = 0; i < Layout::rows; ++i) sums[i] += tile[i], tile[i] = 0;
    }
    __device__ void finish(const Gradient& gradient, const Rows& rows, i32 q_begin) {
#pragma unroll
        for (int i = 0; i < Layout::rows; ++i) {
            const i32 q = q_begin + Layout::row(i);
            const Number sum = lane_sum<1, Layout::row_lanes>(sums[i]);
            if (threadIdx.x % Layout::row_lanes == 0 && q < rows.q_len) Sums::add(args, gradient.row(q + rows.q_offset, rows.kv_offset).element(0, 0), sum);
        }
    }

   private:
    const Args& args;
    Number tile[Layout::rows] = {}, sums[Layout::rows] = {};
};
