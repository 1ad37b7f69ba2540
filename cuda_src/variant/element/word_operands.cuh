#pragma once
// This is how K and V of 16 bits, in the format of the products, become b operands of mma.sync (ptx/mma.cuh): ldmatrix brings them as they are.
#include "ptx/base.cuh"

struct WordOperands {
    static constexpr int steps = 1;         // of a contraction with K, 16 columns each, in 32 bytes of a row
    static constexpr int dealt_blocks = 1;  // blocks of eight columns of a result over which the columns of V are dealt

    // Of 16 keys and 32 bytes of their rows, for each step, and each eight keys.
    __device__ static void of_k(u32 (&b)[steps][2][2], const u32 (&words)[4]) {
        b[0][0][0] = words[0], b[0][0][1] = words[1], b[0][1][0] = words[2], b[0][1][1] = words[3];
    }
    // Likewise, transposed, for each eight columns of the result.
    __device__ static void of_v(u32 (&b)[2 * steps][2], const u32 (&words)[4]) {
        b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
    // Says whether a lane's columns of such blocks belong to the second of two, to which lane's place the i-th pair of them, and the pair.
    __device__ static bool is_upper(u32) { return false; }
    __device__ static u32 place(u32 lane, int) { return lane; }
    __device__ static float4 pair(const float* x, int) { return make_float4(x[0], x[1], x[2], x[3]); }
};
