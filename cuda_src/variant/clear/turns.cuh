#pragma once
// The turns of a tile of dq, which its contributors count (variant/store/dq_ordered.cuh).
#include "variant/work_tile.cuh"

struct ClearTurns {
    // `place`: of the tile in scratch.
    __device__ static void clear(const Args& args, const Rows&, const Mask&, const WorkTile&, i32 place) {
        if (threadIdx.x < cfg::dq_chains) args.turns[place * cfg::dq_chains + threadIdx.x] = 0;
    }
};
