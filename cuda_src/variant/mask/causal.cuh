#pragma once
// Keys up to the query's own position: kv <= q + shift.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct Causal {
    i32 shift, q_len, kv_len;

    __device__ Causal(const Args&, const Rows& rows, const WorkTile&)
        : shift(rows.shift(cfg::causal_to_last)), q_len(rows.q_len), kv_len(rows.kv_len) {}

    __device__ i32 end(i32 q) const { return max(0, min(q + shift + 1, kv_len)); }
    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        return {0, 0, end(q_begin) / cfg::tile_kv, ceil_div(end(q_end - 1), cfg::tile_kv)};
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        const i32 full_begin = kv_end <= kv_len ? kv_end - 1 - shift : q_len;
        return TileRange::of_queries(kv_begin - shift, full_begin, q_len, kv_begin < kv_len ? q_len : 0, q_len);
    }
    __device__ KeptKeys row(i32 q, i32 first) const { return {0, end(q) - first}; }
};
