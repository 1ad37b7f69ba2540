#pragma once
// The key tiles of a block, for warps that go along them by themselves: a list with holes. Each warp scans; all find the same tiles.
#include "variant/walk/scan.cuh"

// The last one first, or with `up` the first one.
template <bool up = false>
struct ListCursor {
    static constexpr int most_ahead = 1;
    const KeyTiles own;
    Scan<KeyTiles, up> scan;
    Visit at, after;
    bool is_first_tile = true;

    // Query rows [begin, begin + count) of the block's are the warp's.
    __device__ ListCursor(const Mask& mask, const Rows& rows, const WorkTile& work, i32 begin, i32 count)
        : own(mask, rows, work.head, begin, count), scan({mask, rows, work.head, work.q_begin, cfg::tile_q}), at(next()), after(next()) {}

    // The class for the warp's rows, and 4 where the block keeps any.
    __device__ Visit next() {
        return scan.next([this](i32 tile) { return scan.line.classify(tile) ? 4 | u32(own.classify(tile)) : 0; });
    }
    __device__ bool more(int ahead = 0) const { return (ahead ? after : at).classes != 0; }
    __device__ i32 tile(int ahead = 0) const { return (ahead ? after : at).tile; }
    __device__ void advance() {
        at = after, after = next();
        is_first_tile = false;
    }
    // Of the warp's rows: whether they keep keys of the tile, and all of them; and whether no tile came before.
    __device__ bool is_own() const { return at.classes & 3; }
    __device__ bool is_full() const { return (at.classes & 3) == 2; }
    __device__ bool is_first() const { return is_first_tile; }
};
