#pragma once
// A window to the left for each head: kv >= q + shift - args.windows[head].
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct HeadWindow {
    static constexpr bool of_head = true;
    i32 shift, kv_len, left;

    __device__ HeadWindow(const Args& args, const Rows& rows, const WorkTile& work)
        : shift(rows.shift(1)), kv_len(rows.kv_len), left(args.windows[work.head]) {}

    __device__ i32 begin(i32 q) const { return max(0, q + shift - left); }
    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        return TileRange::of_keys(begin(q_begin), begin(q_end - 1), kv_len, kv_len);
    }
    __device__ KeptKeys row(i32 q, i32 first) const { return {begin(q) - first, kv_len - first}; }
};
