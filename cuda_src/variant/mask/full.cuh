#pragma once
// Every key that exists.
#include "tile/range.cuh"

struct Full {
    i32 kv_len;

    __device__ Full(const Args&, const Rows& rows) : kv_len(rows.kv_len) {}

    __device__ TileRange tiles(i32, i32) const { return {0, 0, kv_len / cfg::tile_kv, ceil_div(kv_len, cfg::tile_kv)}; }
    __device__ KeptKeys row(i32, i32 first) const { return {0, kv_len - first}; }
};
