#pragma once
// A mask of sequences of which rows.used queries are used: the others keep no key.
#include "tile/range.cuh"
#include "variant/mask/used_row.cuh"
#include "variant/work_tile.cuh"

template <class M>
struct UsedQueriesMask : M {
    const i32 used;

    __device__ UsedQueriesMask(const Args& args, const Rows& rows, const WorkTile& work) : M(args, rows, work), used(rows.used) {}

    __device__ TileRange kv_tiles(i32 q_begin, i32 q_end) const {
        if (q_begin >= used) return {0, 0, 0, 0};
        const TileRange found = M::kv_tiles(q_begin, min(q_end, used));
        return q_end <= used ? found : TileRange{found.begin, found.end, found.end, found.end};
    }
    template <class Bounds>
    __device__ i32 classify(Bounds q, Bounds head, Bounds kv) const {
        if (q.lo >= used) return 0;
        const i32 found = M::classify(Bounds{q.lo, min(q.hi, used - 1)}, head, kv);
        return q.hi < used ? found : min(found, 1);
    }
    __device__ auto row(i32 q, i32 first) const {
        const auto row = M::row(q, first);
        return UsedRow<decltype(M::row(q, first))>{row, q < used};
    }
};
