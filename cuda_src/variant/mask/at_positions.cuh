#pragma once
// A mask beside functions that see positions: a query before the first key keeps none, and no function is asked for it.
#include "tile/range.cuh"
#include "variant/mask/used_row.cuh"
#include "variant/work_tile.cuh"

template <class M>
struct AtPositionsMask : M {
    const i32 first;  // query that stands at a key

    __device__ AtPositionsMask(const Args& args, const Rows& rows, const WorkTile& work) : M(args, rows, work), first(max(0, -rows.q_offset)) {}

    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        if (q_end <= first) return {0, 0, 0, 0};
        const TileRange found = M::kv_tiles(max(q_begin, first), q_end);
        return q_begin >= first ? found : TileRange{found.begin, found.end, found.end, found.end};
    }
    template <class Bounds>
    __device__ i32 classify(Bounds q, Bounds head, Bounds kv) const {
        if (q.hi < first) return 0;
        const i32 found = M::classify(Bounds{max(q.lo, first), q.hi}, head, kv);
        return q.lo >= first ? found : min(found, 1);
    }
    __device__ auto row(i32 q, i32 key) const {
        const auto row = M::row(max(q, first), key);
        return UsedRow<decltype(M::row(q, key))>{row, q >= first};
    }
};
