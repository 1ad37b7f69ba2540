#pragma once
// Says whether a tile of dq has a sum: whether the key tiles that its queries visit, which lie side by side, are any.
#include "variant/walk/key_interval.cuh"

struct IntervalSum {
    // `place`: of the tile in scratch.
    __device__ static bool is_there(const Args&, const Rows& rows, const Mask& mask, const WorkTile& work, i32) {
        const TileRange tiles = mask.kv_tiles(work.q_begin, min(work.q_begin + cfg::tile_q, rows.q_len));
        return tiles.begin < tiles.end;
    }
};
