#pragma once
// The gradient of an array whose element follows from the query and not from the key: a row's pairs are added in one order, tile by
// tile, and the row's sum is added to the element's exact sum.
#include "tile/numbers.cuh"

struct OfRows {
    struct Shared {};

    __device__ OfRows(const Args& args, Shared&) : args(args) {}

    template <class Element>
    __device__ void add(int i, int, Number x, Element) {
        tile[i] += x;
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) sums[i] += tile[i], tile[i] = 0;
    }
    __device__ void finish(const Gradient& gradient, const Rows& rows, i32 q_begin) {
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) {
            const i32 q = q_begin + at.y + 16 * i;
            const Number sum = warp_sum<16>(sums[i]);
            if (at.x == 0 && q < rows.q_len) Sums::add(args, gradient.row(q + rows.q_offset, rows.kv_offset).element(0, 0), sum);
        }
    }

  private:
    const Args& args;
    const Place at{};
    Number tile[cfg::tile_q / 16] = {}, sums[cfg::tile_q / 16] = {};
};
