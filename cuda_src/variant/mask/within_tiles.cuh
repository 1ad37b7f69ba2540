#pragma once
// A mask, of which the key tiles [first, last) alone are visited; at first none.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

template <class M>
struct WithinTiles : M {
    i32 first = 0, last = 0;

    __device__ WithinTiles(const Args& args, const Rows& rows, const WorkTile& work) : M(args, rows, work) {}

    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        const TileRange all = M::kv_tiles(q_begin, q_end);
        const i32 begin = max(all.begin, first), end = min(all.end, last);
        if (begin >= end) return {0, 0, 0, 0};
        return {begin, all.full_begin, all.full_end, end};
    }
};
