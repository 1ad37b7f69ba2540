#pragma once
// Rows and turns of dq where key tiles are a list, as clear_turns_and_rows.cuh clears them elsewhere. One warp does both, since asking the mask takes more instructions than all else in this pass.
#include "variant/dq/clear_rows.cuh"
#include "variant/dq/clear_turns.cuh"

struct ClearListTurnsDq {
    __device__ static void clear(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 place) {
        if (threadIdx.x >= 32) return;
        if (ClearTurns::set_first(args, rows, mask, work, place) == 0) clear_dq_rows(args, rows, work, 32);
    }
};
