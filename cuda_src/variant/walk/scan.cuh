#pragma once
// The key tiles of some queries where the mask leaves holes between them: a warp finds them, last one first. It asks the mask for 32
// tiles at a time, a tile each lane, after it has asked in the same way for 32 times as many together. Nothing is stored, whatever
// the length.
#include "tile/range.cuh"
#include "variant/function/range.cuh"
#include "variant/interfaces.cuh"

using Bounds = function::Ints;
template struct ListMaskOption<Mask, Bounds>;

// Query rows of a work.
struct QueryRows {
    const Mask& mask;
    const Rows& rows;
    const i32 head, begin, count;

    // Their class with keys [kv_begin, kv_begin + kv_count), as of the mask's classify. Rows and keys past the last ones do not count,
    // but keys there make no tile full: the mask drops them.
    __device__ i32 classify(i32 kv_begin, i32 kv_count) const {
        const i32 q_left = rows.q_len - begin, kv_left = rows.kv_len - kv_begin;
        if (q_left <= 0 || kv_left <= 0 || kv_begin < 0) return 0;
        const i32 found = mask.classify(Bounds{begin, begin + min(q_left, count) - 1}, Bounds{head, head},
                                        Bounds{kv_begin, kv_begin + min(kv_left, kv_count) - 1});
        return found == 2 && kv_left < kv_count ? 1 : found;
    }
    __device__ i32 classify(i32 tile) const { return classify(tile * cfg::tile_kv, cfg::tile_kv); }
};

// A key tile that is visited: its classes are not 0. Those of none are.
struct Visit {
    i32 tile;
    u32 classes;
};

struct Scan {
    static constexpr i32 together = 32 * cfg::tile_kv;  // keys
    const QueryRows block;
    i32 region, group = -1;               // the next 32 groups of 32 tiles; the group at hand
    u32 groups = 0, tiles = 0, mine = 0;  // those of the region and of the group that are left; the classes of this lane's tile

    __device__ explicit Scan(const QueryRows& block) : block(block), region(ceil_div(ceil_div(block.rows.kv_len, together), 32)) {}

    // By the whole warp. `classes_of` says of a tile what is to be known of it; where that is 0, the tile is not visited.
    template <class ClassesOf>
    __device__ Visit next(ClassesOf classes_of) {
        const i32 lane = threadIdx.x % 32;
        while (!tiles) {
            while (!groups) {
                if (region == 0) return {0, 0};
                --region;
                groups = __ballot_sync(0xffffffffu, block.classify((region * 32 + 31 - lane) * together, together) != 0);
            }
            group = region * 32 + 31 - take(groups);
            mine = classes_of(group * 32 + 31 - lane);
            tiles = __ballot_sync(0xffffffffu, mine != 0);
        }
        const i32 bit = take(tiles);
        return {group * 32 + 31 - bit, __shfl_sync(0xffffffffu, mine, bit)};
    }
    // The lowest bit that is set, which it clears.
    __device__ static i32 take(u32& bits) {
        const i32 bit = __ffs(bits) - 1;
        bits &= bits - 1;
        return bit;
    }
};
