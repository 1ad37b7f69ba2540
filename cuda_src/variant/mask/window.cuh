#pragma once
// A band around the query's own position: q + shift - left <= kv <= q + shift + right. The host cuts both sides to 2^30, which is beyond
// every sequence, so no sum leaves 32 bits.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct Window {
    i32 shift, q_len, kv_len, left, right;

    __device__ Window(const Args& args, const Rows& rows, const WorkTile&)
        : shift(rows.shift(cfg::window_to_last)), q_len(rows.q_len), kv_len(rows.kv_len), left(args.window_left),
          right(args.window_right) {}

    __device__ i32 begin(i32 q) const { return max(0, q + shift - left); }
    __device__ i32 end(i32 q) const { return max(0, min(q + shift + right + 1, kv_len)); }
    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        return TileRange::of_keys(begin(q_begin), begin(q_end - 1), end(q_begin), end(q_end - 1));
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        const i32 last = min(kv_end, kv_len) - 1;  // a key that exists
        return TileRange::of_queries(kv_begin - shift - right, kv_end <= kv_len ? last - shift - right : q_len,
                                     kv_begin - shift + left + 1, kv_begin <= last ? last - shift + left + 1 : 0, q_len);
    }
    __device__ KeptKeys row(i32 q, i32 first) const { return {begin(q) - first, end(q) - first}; }
};
