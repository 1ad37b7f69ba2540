#pragma once
// This says which pairs of a tile a thread has, of 16 x 16 threads: rows y, y + 16, ... and keys x, x + 16, ...
#include "ptx/base.cuh"

struct SimtLayout {
    static constexpr int warps = 8, row_lanes = 16, rows = cfg::tile_q / 16, keys = cfg::tile_kv / 16;

    __device__ static int row(int i) { return threadIdx.x / 16 + 16 * i; }
    __device__ static int first_key() { return threadIdx.x % 16; }
    __device__ static constexpr int offset(int j) { return 16 * j; }  // of its j-th key, from its first
};
