#pragma once
// The product dq' = K' dS' of a tile and what a pass makes of its sums: a row of the accumulators is a column of K, so that a tile may have
// any number of queries that is a multiple of 16. A warpgroup has 64 columns.
#include "ptx/movmatrix.cuh"
#include "tile/fragment.cuh"

struct DqTransposed {
    static constexpr int lanes = 128;  // threads that have a part of the columns

    template <class Mma, int n>
    __device__ static void multiply(float (&dq)[n], u64 ds, u64 k, bool add) { Mma::multiply(dq, k, ds, add); }
    // Of 16 queries a warp has 16 columns: four blocks of 8 x 8, which it transposes, and whose rows a quad then writes 16 bytes a lane.
    template <class DqRows, int n>
    __device__ static void store(unsigned char* to, i64 row_bytes, i32 q_begin, i32 end, i32 columns, const float (&x)[n], float scale) {
        const i32 lane = threadIdx.x % lanes, row = q_begin + lane % 32 / 4 + lane % 4 / 2 * 8, column = lane / 32 * 16 + lane % 2 * 8;
#pragma unroll
        for (int i = 0; i < n; i += 8) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) words[j] = ptx::movmatrix_transposed(Element::pack(x[i + 2 * j] * scale, x[i + 2 * j + 1] * scale));
            transpose_quad(words);
            if (row + 2 * i < end && column < columns)
                *reinterpret_cast<uint4*>(to + (row + 2 * i) * row_bytes + column * 2) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};
