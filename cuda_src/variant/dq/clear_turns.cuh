#pragma once
// Whose turn it is to add to a tile of dq (variant/dq/ordered.cuh): the first one's.
#include "variant/work_tile.cuh"

struct ClearTurns {
    // `place`: of the tile in scratch.
    __device__ static void clear(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 place) {
        if (threadIdx.x < 32) set_first(args, rows, mask, work, place);
    }
    // By a whole warp: what it sets the counters to.
    __device__ static i32 set_first(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 place) {
        const i32 first = Turn::first(mask, rows, work);
        if (threadIdx.x < cfg::dq_chains) args.turns[place * cfg::dq_chains + threadIdx.x] = first;
        return first;
    }
};
