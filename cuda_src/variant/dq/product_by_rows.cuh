#pragma once
// The product dq = dS K of a tile and what a pass makes of its sums: a row of the accumulators is a query.
#include "tile/fragment.cuh"

struct DqByRows {
    static constexpr int lanes = 2 * cfg::tile_q;  // threads that have a part of the columns

    template <class Mma, int n>
    __device__ static void multiply(float (&dq)[n], u64 ds, u64 k, bool add) { Mma::multiply(dq, ds, k, add); }
    // Rows from `q_begin` on, before `end`, of a part's columns.
    template <class DqRows, int n>
    __device__ static void store(unsigned char* to, i64 row_bytes, i32 q_begin, i32 end, i32 columns, const float (&x)[n], float scale) {
        const i32 lane = threadIdx.x % lanes;
        DqRows::store(to, row_bytes, q_begin + lane / 32 * 16 + lane % 32 / 4, end, columns, x, scale);
    }
};
