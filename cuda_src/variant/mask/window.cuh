#pragma once
// A band around the query's own position: q + shift - left <= kv <= q + shift + right.
#include "tile/range.cuh"

struct Window {
    i32 shift, q_len, kv_len, left, right;

    __device__ Window(const Args& args, const Rows& rows)
        : shift(cfg::window_to_last * (rows.kv_len - rows.q_len)), q_len(rows.q_len), kv_len(rows.kv_len), left(args.window_left),
          right(args.window_right) {}

    __device__ i32 begin(i32 q) const { return max(0, q + shift - left); }
    __device__ i32 end(i32 q) const { return max(0, min(q + shift + right + 1, kv_len)); }
    __device__ TileRange tiles(i32 q_begin, i32 q_end) const {
        return TileRange::of_keys(begin(q_begin), begin(q_end - 1), end(q_begin), end(q_end - 1));
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        const i32 first = kv_begin - shift, last = kv_end - 1 - shift;  // where those keys stand among the queries
        return TileRange::of_queries(first - right, last - right, first + left + 1, last + left + 1, q_len);
    }
    __device__ KeptKeys row(i32 q, i32 first) const { return {begin(q) - first, end(q) - first}; }
};
