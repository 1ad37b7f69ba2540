#pragma once
// A mask whose tiles are an interval, as one whose tiles are a list.
#include "function/range.cuh"
#include "variant/work_tile.cuh"

template <class M>
struct Listed : M {
    static constexpr bool cheap = true;
    using M::M;

    template <class Bounds>
    __device__ i32 classify(Bounds q, Bounds, Bounds kv) const {
        const TileRange tiles = M::kv_tiles(q.lo, q.hi + 1);
        const i32 first = kv.lo / cfg::tile_kv, last = kv.hi / cfg::tile_kv;
        if (last < tiles.begin || first >= tiles.end) return 0;
        return first >= tiles.full_begin && last < tiles.full_end ? 2 : 1;
    }
};
