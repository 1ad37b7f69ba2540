#pragma once
// The key tiles of a block, for warps that go along them by themselves: they lie side by side, and so do those of each warp.
#include "tile/range.cuh"
#include "variant/interfaces.cuh"

template struct KvTilesOption<Mask>;

// The key tiles of query rows [q_begin, q_begin + count) of a sequence.
__device__ inline TileRange tiles_of(const Mask& mask, const Rows& rows, i32 q_begin, i32 count) {
    if (q_begin >= rows.q_len) return {0, 0, 0, 0};
    return mask.kv_tiles(q_begin, min(q_begin + count, rows.q_len));
}

struct IntervalCursor {
    static constexpr int most_ahead = 1 << 30;
    const TileRange block, own;
    i32 at;

    // Query rows [begin, begin + count) of the block's are the warp's.
    __device__ IntervalCursor(const Mask& mask, const Rows& rows, const WorkTile& work, i32 begin, i32 count)
        : block(tiles_of(mask, rows, work.q_begin, cfg::tile_q)), own(tiles_of(mask, rows, begin, count)), at(block.end - 1) {}

    __device__ bool more(int ahead = 0) const { return at - ahead >= block.begin; }
    __device__ i32 tile(int ahead = 0) const { return at - ahead; }
    __device__ void advance() { --at; }
    // Of the warp's rows: whether they keep keys of the tile, and all of them; and whether none came before.
    __device__ bool is_own() const { return at >= own.begin && at < own.end; }
    __device__ bool is_full() const { return own.is_full(at); }
    __device__ bool is_first() const { return at == own.end - 1; }
};
