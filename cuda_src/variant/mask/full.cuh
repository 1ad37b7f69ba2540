#pragma once
// Every key that exists.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct Full {
    i32 q_len, kv_len;

    __device__ Full(const Args&, const Rows& rows, const WorkTile&) : q_len(rows.q_len), kv_len(rows.kv_len) {}

    __device__ TileRange kv_tiles(i32, i32) const { return {0, 0, kv_len / cfg::tile_kv, ceil_div(kv_len, cfg::tile_kv)}; }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        return TileRange::of_queries(0, kv_end <= kv_len ? 0 : q_len, q_len, kv_begin < kv_len ? q_len : 0, q_len);
    }
    __device__ KeptKeys row(i32, i32 first) const { return {0, kv_len - first}; }
};
