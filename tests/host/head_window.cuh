#pragma once
// A window to the left that is longer in each head: kv >= q + shift - (args.head_window_first + args.head_window_step * head).
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct HeadWindow {
    static constexpr bool of_head = true;
    i32 shift, q_len, kv_len, left;

    __device__ HeadWindow(const Args& args, const Rows& rows, const WorkTile& work)
        : shift(rows.shift(1)), q_len(rows.q_len), kv_len(rows.kv_len), left(args.head_window_first + args.head_window_step * work.head) {}

    __device__ i32 begin(i32 q) const { return min(max(0, q + shift - left), kv_len); }
    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        return TileRange::of_keys(begin(q_begin), begin(q_end - 1), kv_len, kv_len);
    }
    __device__ TileRange q_tiles(i32 kv_begin, i32 kv_end) const {
        const i32 last = min(kv_end, kv_len) - 1;  // a key that exists
        return TileRange::of_queries(0, kv_end <= kv_len ? 0 : q_len, kv_begin - shift + left + 1,
                                     kv_begin <= last ? last - shift + left + 1 : 0, q_len);
    }
    __device__ KeptKeys row(i32 q, i32 first) const { return {begin(q) - first, kv_len - first}; }
};
