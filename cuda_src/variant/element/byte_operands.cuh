#pragma once
// This is how K and V of eight bits become b operands of mma.sync (ptx/mma.cuh), which are halves: E::pairs_of_k and pairs_of_v make them, exactly.
//
// A word of ldmatrix has four columns 4 l to 4 l + 3 of a key, l = lane % 4. An operand has columns 2 l, 2 l + 1 and 2 l + 8, 2 l + 9, so
// the contraction goes over the columns in another order, in which Q lies, too (variant/q_operand/scaled.cuh). Transposed, a word has
// columns 2 g and 2 g + 1 of two keys, g = lane / 4, where an operand has one column: even columns are one block of eight of the
// result, odd ones the next. A lane then has columns 4 l to 4 l + 3 of 16, in place of 2 l, 2 l + 1 in each block.
#include "ptx/base.cuh"

template <class E>
struct ByteOperands {
    static constexpr int steps = 2, dealt_blocks = 2;

    __device__ static void of_k(u32 (&b)[steps][2][2], const u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) E::pairs_of_k(b[i % 2][i / 2], words[i]);
    }
    __device__ static void of_v(u32 (&b)[2 * steps][2], const u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 columns[2];
            E::pairs_of_v(columns, words[i]);
            b[i / 2 * 2][i % 2] = columns[0], b[i / 2 * 2 + 1][i % 2] = columns[1];
        }
    }
    __device__ static bool is_upper(u32 lane) { return lane % 4 >= 2; }
    __device__ static u32 place(u32 lane, int i) { return lane / 4 * 4 + lane % 2 * 2 + i; }
    __device__ static float4 pair(const float* x, int i) { return make_float4(x[i], x[4 + i], x[2 + i], x[6 + i]); }
};
