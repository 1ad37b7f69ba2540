#pragma once
// Says whether a tile of dq has a sum; `place` is the tile's in scratch. add_others calls add(n) for each sum of it behind the first.
#include "tile/range.cuh"
#include "variant/interfaces_bwd.cuh"

struct OneSum {
    template <class... A>
    __device__ static void add_others(const A&...) {}
};
// Where the key tiles that its queries visit lie side by side: if they are any.
struct IntervalSum : OneSum {
    template <class A, class M>
    __device__ static bool is_there(const A&, const Rows& rows, const M& mask, const WorkTile& work, i32) {
        const TileRange tiles = mask.kv_tiles(work.q_begin, min(work.q_begin + cfg::tile_q, rows.q_len));
        return tiles.begin < tiles.end;
    }
};
// Where these go round several sums (variant/dq/ordered_sums.cuh): as many as key tiles came to.
struct IntervalSums : IntervalSum {
    template <class A, class M, class Add>
    __device__ static void add_others(const A& args, const Rows& rows, const M& mask, const WorkTile& work, const Add& add) {
        const TileRange tiles = mask.kv_tiles(work.q_begin, min(work.q_begin + cfg::tile_q, rows.q_len));
#pragma unroll 1
        for (i32 n = 1; n < min(tiles.end - tiles.begin, args.dq_sums); ++n) add(n);
    }
};
// Where they are a list that take turns (variant/walk/turn_list.cuh): if any had one. What the rows' logarithms are says nothing of that:
// they may be of a sink, or of keys that other calls have.
struct ListSum : OneSum {
    template <class A, class M>
    __device__ static bool is_there(const A& args, const Rows&, const M&, const WorkTile&, i32 place) {
        return args.turns[place * cfg::dq_chains] != 0;
    }
};
// Where steps of lists of blocks go round several sums: if any came to that one.
struct ListSums : ListSum {
    template <class A, class M, class Add>
    __device__ static void add_others(const A& args, const Rows& rows, const M& mask, const WorkTile& work, const Add& add) {
        const i32 place = place_of(args, rows, work.head, work.q_begin / cfg::tile_q), tiles = args.heads * args.q_blocks;
#pragma unroll 1
        for (i32 n = 1; n < args.dq_sums && is_there(args, rows, mask, work, place + n * tiles); ++n) add(n);
    }
};
// Where it was cleared before key tiles added to it (variant/dq/clear_sum.cuh): always.
struct ClearedSum : OneSum {
    template <class A, class M>
    __device__ static bool is_there(const A&, const Rows&, const M&, const WorkTile&, i32) { return true; }
};
