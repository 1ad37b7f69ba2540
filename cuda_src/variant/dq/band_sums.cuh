#pragma once
// Says which sums a tile of dq has where key tiles add in bands (variant/walk/q_interval_band.cuh), args.dq_sums / args.group_parts sums for each:
// as many of a band's as key tiles came to.
#include "variant/walk/band.cuh"

struct BandSums {
    template <class A>
    __device__ static bool has(const A& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 n) {
        const i32 sums = args.dq_sums / args.group_parts;
        const TileRange keys = tiles_of_band(args, rows, mask, work.q_begin / cfg::tile_q, n / sums);
        return n % sums < keys.end - keys.begin;
    }
    template <class A>
    __device__ static bool is_there(const A& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32) { return has(args, rows, mask, work, 0); }
    template <class A, class Add>
    __device__ static void add_others(const A& args, const Rows& rows, const Mask& mask, const WorkTile& work, const Add& add) {
#pragma unroll 1
        for (i32 n = 1; n < args.dq_sums; ++n)
            if (has(args, rows, mask, work, n)) add(n);
    }
};
