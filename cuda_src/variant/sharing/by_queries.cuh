#pragma once
// Warps that have the same keys divide the queries of a step: each makes S, P and dS of its own, and several meet in shared memory.
#include "tile/warp_sums.cuh"

struct ByQueries {
    static constexpr bool meets = cfg::sharing > 1;  // P and dS of others are read from shared memory
    static constexpr int queries = cfg::tile_q / cfg::sharing, stride = 1;
    struct Board {};

    __device__ static u32 first_query(u32 member) { return member * queries; }
    __device__ static constexpr u32 first_block(u32) { return 0; }
    __device__ static constexpr bool leaves(int, u32) { return true; }
    template <int n, int m>
    __device__ static void add_up(Board&, float (&)[n][m][8], u32, bool) {}
};
