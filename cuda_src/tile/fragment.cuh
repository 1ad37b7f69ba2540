#pragma once
// Accumulators of a warpgroup's 64 x n product: register i of a thread holds row 16 * warp + lane / 4 + 8 * (i / 2 % 2) and column
// 8 * (i / 4) + 2 * (lane % 4) + i % 2. A row's columns lie in the four lanes of a quad.
#include "ptx/base.cuh"

__device__ constexpr int fragment_row(int i) { return i / 2 % 2; }         // 0: the thread's upper row, 1: the lower, eight below
__device__ constexpr int fragment_column(int i) { return i / 4 * 8 + i % 2; }  // from the thread's first column

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
    constexpr int chains = n >= 16 ? 4 : n / 4;
    float a[chains];
#pragma unroll
    for (int c = 0; c < chains; ++c) a[c] = op(s[4 * c + 2 * r], s[4 * c + 2 * r + 1]);
#pragma unroll
    for (int i = 4 * chains; i < n; i += 4) a[i / 4 % chains] = op(op(a[i / 4 % chains], s[i + 2 * r]), s[i + 2 * r + 1]);
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
