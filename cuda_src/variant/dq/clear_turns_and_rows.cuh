#pragma once
// The turns of a tile of dq, and the rows of dq themselves where no key is kept.
#include "variant/dq/clear_rows.cuh"
#include "variant/dq/clear_turns.cuh"
#include "variant/walk/key_interval.cuh"

struct ClearTurnsDq {
    __device__ static void clear(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 place) {
        ClearTurns::clear(args, rows, mask, work, place);
        const TileRange keys = tiles_of(mask, rows, work.q_begin, cfg::tile_q);
        if (keys.begin >= keys.end) clear_dq_rows(args, rows, work, cfg::threads);
    }
};
