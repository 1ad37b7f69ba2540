#pragma once
// Says whether a tile of dq has a sum, where key tiles are a list and rows have sinks: the logarithm of a row that keeps no key is finite then,
// too, so the mask is asked whether the tile visits any.
#include "variant/walk/scan.cuh"

struct SinksListSum {
    // By a whole warp.
    __device__ static bool is_there(const Args&, const Rows& rows, const Mask& mask, const WorkTile& work, i32) {
        Scan<KeyTiles, true> scan({mask, rows, work.head, work.q_begin, cfg::tile_q});
        return scan.next([&](i32 tile) { return u32(scan.line.classify(tile)); }).classes != 0;
    }
};
