#pragma once
// Whose turn it is to add to each of the sums of a tile of dq (variant/dq/ordered_sums.cuh): the first one's.
#include "variant/dq/clear_turns.cuh"

struct ClearTurnsOfSums {
    __device__ static void clear(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 place) {
        const i32 tiles = args.heads * args.q_blocks;
        for (i32 sum = 0; sum < args.dq_sums; ++sum) ClearTurns::clear(args, rows, mask, work, place + sum * tiles);
    }
};
