#pragma once
// Says whether a tile of dq has a sum; `place` is the tile's in scratch.
#include "tile/range.cuh"
#include "variant/interfaces_bwd.cuh"

// Where the key tiles that its queries visit lie side by side: if they are any.
struct IntervalSum {
    template <class A, class M>
    __device__ static bool is_there(const A&, const Rows& rows, const M& mask, const WorkTile& work, i32) {
        const TileRange tiles = mask.kv_tiles(work.q_begin, min(work.q_begin + cfg::tile_q, rows.q_len));
        return tiles.begin < tiles.end;
    }
};
// Where they are a list that take turns (variant/walk/turn_list.cuh): if any had one. What the rows' logarithms are says nothing of that:
// they may be of a sink, or of keys that other calls have.
struct ListSum {
    template <class A, class M>
    __device__ static bool is_there(const A& args, const Rows&, const M&, const WorkTile&, i32 place) {
        return args.turns[place * cfg::dq_chains] != 0;
    }
};
// Where it was cleared before key tiles added to it (variant/dq/clear_sum.cuh): always.
struct ClearedSum {
    template <class A, class M>
    __device__ static bool is_there(const A&, const Rows&, const M&, const WorkTile&, i32) { return true; }
};
