#pragma once
// This says how key tiles of a packed sequence go round: in equal windows of as many as begin at query tiles of their own and run at once, and
// how many 256ths of a query tile lie between their beginnings.
#include "tile/range.cuh"

struct Rounds {
    i32 window, q_stride;

    __device__ explicit Rounds(const Rows& rows) {
        const i32 kv_tiles = max(1, ceil_div(rows.kv_len, cfg::tile_kv)), q_tiles = max(1, ceil_div(rows.q_len, cfg::tile_q));
        window = ceil_div(kv_tiles, ceil_div(kv_tiles, min(min(kv_tiles, q_tiles), i32(gridDim.x))));
        q_stride = 256 * min(q_tiles, 1 << 22) / window;
    }
};
