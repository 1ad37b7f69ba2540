#pragma once
// Accumulators of a warp's product. They are made of blocks of 16 x 8, of which a thread has four registers: rows lane / 4 and
// + 8, columns 2 * (lane % 4) and the next. A row's columns lie in the four lanes of a quad. A warp has cfg::m_tiles_per_warp blocks below
// each other, then as many of the next eight columns, and so on; a warpgroup's product has one slab in each warp.
#include "ptx/base.cuh"

constexpr int rows_each = 2 * cfg::m_tiles_per_warp;  // rows of a thread: eight apart

__device__ constexpr int fragment_row(int i) { return i / 4 % cfg::m_tiles_per_warp * 2 + i / 2 % 2; }    // of those; 0 is the upmost
__device__ constexpr int fragment_column(int i) { return i / (4 * cfg::m_tiles_per_warp) * 8 + i % 2; }  // from the thread's first column
__device__ constexpr int fragment_index(int block, int row) { return (block * cfg::m_tiles_per_warp + row / 2) * 4 + row % 2 * 2; }

// Replaces each element by f(element, row, key); the thread's first element is that of row `row` and key `first`. What knows blocks
// of 16 x 16 gets the four registers of each of its halves, of eight columns.
template <class F, int n>
__device__ void map_fragment(const F& f, float (&s)[n], i32 row, i32 first) {
    if constexpr (requires { f.apply(s); }) {
        f.apply(s);
    } else if constexpr (requires(float* const(&block)[2]) { f.apply_block(block, row, first); }) {
#pragma unroll
        for (int i = 0; i < n / 8; ++i) {
            const int m = i % cfg::m_tiles_per_warp, column = i / cfg::m_tiles_per_warp;
            float* const block[2] = {s + fragment_index(2 * column, 2 * m), s + fragment_index(2 * column + 1, 2 * m)};
            f.apply_block(block, row + 16 * m, first + 16 * column);
        }
    } else {
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] = f(s[i], row + 8 * fragment_row(i), first + fragment_column(i));
    }
}

__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Folds the registers of row r by `op`, in four chains, whose latencies overlap.
template <int n, class Op>
__device__ float fold_row(const float (&s)[n], int r, Op op) {
    constexpr int blocks = n / (4 * cfg::m_tiles_per_warp), chains = blocks < 4 ? blocks : 4;
    float a[chains];
#pragma unroll
    for (int i = 0; i < blocks; ++i) {
        const float x = s[fragment_index(i, r)], y = s[fragment_index(i, r) + 1];
        a[i % chains] = i < chains ? op(x, y) : op(op(a[i % chains], x), y);
    }
#pragma unroll
    for (int c = 1; c < chains; ++c) a[0] = op(a[0], a[c]);
    return a[0];
}

// Transposes 4 x 4 words within a quad: lane j gives x[i] to lane i and ends with word j of each lane, in order.
__device__ inline void transpose_quad(u32 (&x)[4]) {
    const u32 j = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const bool upper = j & bit;
            const u32 got = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i | bit], bit);
            if (upper) x[i] = got;
            else x[i | bit] = got;
        }
}
