#pragma once
// The key tiles of a block, for warps that go along them by themselves: they lie side by side, and so do those of each warp.
#include "variant/walk/key_interval.cuh"

// The last one first, or with `up` the first one.
template <bool up = false>
struct IntervalCursor {
    static constexpr int most_ahead = 1 << 30;
    const TileRange block, own;
    i32 at;

    // Query rows [begin, begin + count) of the block's are the warp's.
    __device__ IntervalCursor(const Mask& mask, const Rows& rows, const WorkTile& work, i32 begin, i32 count)
        : block(tiles_of(mask, rows, work.q_begin, cfg::tile_q)), own(tiles_of(mask, rows, begin, count)), at(up ? block.begin : block.end - 1) {}

    __device__ bool more(int ahead = 0) const { return up ? at + ahead < block.end : at - ahead >= block.begin; }
    __device__ i32 tile(int ahead = 0) const { return up ? at + ahead : at - ahead; }
    __device__ void advance() { at += up ? 1 : -1; }
    // Of the warp's rows: whether they keep keys of the tile, and all of them; and whether none came before.
    __device__ bool is_own() const { return at >= own.begin && at < own.end; }
    __device__ bool is_full() const { return own.is_full(at); }
    __device__ bool is_first() const { return at == (up ? own.begin : own.end - 1); }
};
