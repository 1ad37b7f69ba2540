#pragma once
// Tiles of a line, of keys or of queries, where the mask leaves holes between them: a warp finds them. It asks the mask for 32 tiles at a
// time, a tile each lane, after it has asked in the same way for 32 times as many together. Nothing is stored, whatever the length.
#include "tile/range.cuh"
#include "function/range.cuh"
#include "variant/interfaces.cuh"
#include "variant/walk/visit.cuh"

using Bounds = function::Ints;
template struct ListMaskOption<Mask, Bounds>;

// This is what a mask says of boxes of queries and keys of one head.
struct Boxes {
    const Mask& mask;
    const Rows& rows;
    const i32 head;

    // The class of these queries and keys, as of the mask's classify. Those past the last ones do not count, but keys there make no box
    // full: the mask drops them.
    __device__ i32 classify(i32 q_begin, i32 q_count, i32 kv_begin, i32 kv_count) const {
        const i32 q_left = rows.q_len - q_begin, kv_left = rows.kv_len - kv_begin;
        if (q_left <= 0 || kv_left <= 0 || q_begin < 0 || kv_begin < 0) return 0;
        const i32 found = mask.classify(Bounds{q_begin, q_begin + min(q_left, q_count) - 1}, Bounds{head, head},
                                        Bounds{kv_begin, kv_begin + min(kv_left, kv_count) - 1});
        return found == 2 && kv_left < kv_count ? 1 : found;
    }
};
// The key tiles of some query rows, from the last one on ...
struct KeyTiles : Boxes {
    static constexpr bool ascend = false;
    const i32 q_begin, q_count;

    __device__ KeyTiles(const Mask& mask, const Rows& rows, i32 head, i32 q_begin, i32 q_count)
        : Boxes{mask, rows, head}, q_begin(q_begin), q_count(q_count) {}

    __device__ i32 count() const { return ceil_div(rows.kv_len, cfg::tile_kv); }
    // Of tiles together.
    __device__ i32 classify(i32 first, i32 tiles = 1) const {
        return Boxes::classify(q_begin, q_count, first * cfg::tile_kv, tiles * cfg::tile_kv);
    }
};
// ... and the query tiles of a key tile, from the first one on. Key tile n is visited by query tile t exactly if t is by n: both ask for
// the same box.
struct QueryTiles : Boxes {
    static constexpr bool ascend = true;
    const i32 kv_tile;

    __device__ QueryTiles(const Mask& mask, const Rows& rows, i32 head, i32 kv_tile) : Boxes{mask, rows, head}, kv_tile(kv_tile) {}

    __device__ i32 count() const { return ceil_div(rows.q_len, cfg::tile_q); }
    __device__ i32 classify(i32 first, i32 tiles = 1) const {
        return Boxes::classify(first * cfg::tile_q, tiles * cfg::tile_q, kv_tile * cfg::tile_kv, cfg::tile_kv);
    }
};

// In the direction of these, or as `up` says.
template <class Tiles, bool up = Tiles::ascend>
struct Scan {
    const Tiles line;
    const i32 regions;               // of 32 groups of 32 tiles
    i32 left, group = 0;             // regions; the group at hand
    u32 groups = 0, tiles = 0, mine = 0;  // those of the region and of the group that are left; the classes of this lane's tile

    __device__ explicit Scan(const Tiles& line) : line(line), regions(ceil_div(line.count(), 1024)), left(regions) {}

    __device__ bool is_one_group() const { return line.count() <= 32; }
    // Bits stand for tiles, or groups, in the order in which they are visited.
    __device__ static i32 nth(i32 of, i32 bit) { return of * 32 + (up ? bit : 31 - bit); }
    __device__ static i32 bit_of(i32 tile) { return up ? tile % 32 : 31 - tile % 32; }
    __device__ i32 tile(i32 bit) const { return nth(group, bit); }

    // By the whole warp: goes on to the next group that has tiles; false where there is none. `classes_of` says of a tile what is to be
    // known of it; where that is 0, the tile is not visited.
    template <class ClassesOf>
    __device__ bool next_group(ClassesOf classes_of) {
        const i32 lane = threadIdx.x % 32;
        for (tiles = 0; !tiles;) {
            for (; !groups; --left) {
                if (left == 0) return false;
                groups = is_one_group() ? 1u << nth(0, 0) : __ballot_sync(0xffffffffu, line.classify(nth(region(), lane) * 32, 32) != 0);
            }
            group = nth(region() + (up ? -1 : 1), take(groups));
            mine = classes_of(tile(lane));
            tiles = __ballot_sync(0xffffffffu, mine != 0);
        }
        return true;
    }
    // To behind a group that it was at before. By the whole warp.
    __device__ void resume(i32 after) {
        const i32 at = after / 32, lane = threadIdx.x % 32;
        left = up ? regions - at : at + 1;
        groups = __ballot_sync(0xffffffffu, lane > bit_of(after) && line.classify(nth(region(), lane) * 32, 32) != 0);
        --left;
    }
    // To behind a tile, likewise.
    template <class ClassesOf>
    __device__ void resume_behind(i32 last, ClassesOf classes_of) {
        resume(group = last / 32);
        const i32 lane = threadIdx.x % 32;
        mine = lane > bit_of(last) ? classes_of(tile(lane)) : 0;
        tiles = __ballot_sync(0xffffffffu, mine != 0);
    }
    __device__ i32 region() const { return up ? regions - left : left - 1; }
    template <class ClassesOf>
    __device__ Visit next(ClassesOf classes_of) {
        if (!tiles && !next_group(classes_of)) return {0, 0};
        const i32 bit = take(tiles);
        return {tile(bit), __shfl_sync(0xffffffffu, mine, bit)};
    }
    // The lowest bit that is set, which it clears.
    __device__ static i32 take(u32& bits) {
        const i32 bit = __ffs(bits) - 1;
        bits &= bits - 1;
        return bit;
    }
};
