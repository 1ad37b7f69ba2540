#pragma once
// Whose turn it is to add to a tile of dq where key tiles go round (variant/walk/q_interval_rotated.cuh): one window after the other,
// and in a window those first that come to the tile after the fewest steps. With as many steps as there are query tiles in a round, that is
// (tile - first) modulo them. Each work comes to its tiles by that number, and waits at each for smaller ones alone.
#include "variant/walk/turn_interval.cuh"

struct RotatedTurn : IntervalTurn {
    // `in_round`: the number of the query tile among those of which rounds are.
    __device__ static RotatedTurn of(
        const Mask& mask, const Rows& rows, const KvWorkTile& work, i32 q_tile, i32 in_round, i32 window_tiles, i32 q_stride) {
        const TileRange keys = mask.kv_tiles(q_tile * cfg::tile_q, min((q_tile + 1) * cfg::tile_q, rows.q_len));
        const i32 own = work.kv_tile % window_tiles, window = work.kv_tile - own;
        // In the window, of those that add to the tile, [begin, end): key tiles up to `last` begin at the tile or before it.
        const i32 begin = max(keys.begin - window, 0), end = min(keys.end - window, window_tiles);
        const i32 last = i32(((u32(in_round) + 1) * 256 - 1) / u32(q_stride));
        const i32 before = own <= last ? min(last + 1, end) - own - 1 : end - own - 1 + max(0, last + 1 - begin);
        return {{max(window - keys.begin, 0) + before, keys.end - 1 - keys.begin}};
    }
};
