#pragma once
// The key tiles of some query rows of a sequence, where they lie side by side.
#include "tile/range.cuh"
#include "variant/interfaces.cuh"

template struct KvTilesOption<Mask>;

// Of rows [q_begin, q_begin + count).
__device__ inline TileRange tiles_of(const Mask& mask, const Rows& rows, i32 q_begin, i32 count) {
    if (q_begin >= rows.q_len) return {0, 0, 0, 0};
    return mask.kv_tiles(q_begin, min(q_begin + count, rows.q_len));
}
