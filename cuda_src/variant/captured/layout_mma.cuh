#pragma once
// This says which pairs of a tile a thread has, where each warp has sums of 16 rows by mma.sync (tile/warp_sums.cuh).
#include "ptx/base.cuh"

struct MmaLayout {
    static constexpr int warps = cfg::tile_q / 16, row_lanes = 4, rows = 2, keys = cfg::tile_kv / 4;

    __device__ static int row(int i) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * i; }
    __device__ static int first_key() { return threadIdx.x % 4 * 2; }
    __device__ static constexpr int offset(int j) { return j / 2 * 8 + j % 2; }  // of its j-th key, from its first
};
