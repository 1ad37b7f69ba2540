#pragma once
// Every key that exists.
#include "tile/range.cuh"

struct Full {
    struct Row {
        i32 room;
        __device__ bool keep(i32 offset) const { return offset < room; }
    };
    i32 kv_len;

    __device__ Full(const Args&, const Rows& rows) : kv_len(rows.kv_len) {}

    __device__ TileRange tiles(i32, i32) const { return {0, 0, kv_len / cfg::tile_kv, ceil_div(kv_len, cfg::tile_kv)}; }
    __device__ Row row(i32, i32 first) const { return {kv_len - first}; }
};
