#pragma once
// The key tiles of some queries where the mask leaves holes between them: a warp finds them, last one first. It asks the mask for 32
// tiles at a time, a tile each lane, after it has asked in the same way for 32 times as many together. Nothing is stored, whatever
// the length.
#include "tile/range.cuh"
#include "tile/ring.cuh"
#include "variant/function/range.cuh"
#include "variant/interfaces.cuh"

using Bounds = user::Range<i32>;
template struct ListMaskOption<Mask, Bounds>;

// The class of queries [q_begin, q_begin + q_count) and keys [kv_begin, kv_begin + kv_count) of a work's head, as of the mask's
// classify; those past the last ones do not count, but keys there make no tile full: the mask drops them.
__device__ inline i32 classify(const Mask& mask, const Rows& rows, i32 head, i32 q_begin, i32 q_count, i32 kv_begin, i32 kv_count) {
    const i32 q = rows.q_len - q_begin, kv = rows.kv_len - kv_begin;  // how many are left
    if (q <= 0 || kv <= 0 || kv_begin < 0) return 0;
    const i32 found = mask.classify(Bounds{q_begin, q_begin + min(q, q_count) - 1}, Bounds{head, head},
                                    Bounds{kv_begin, kv_begin + min(kv, kv_count) - 1});
    return found == 2 && kv < kv_count ? 1 : found;
}

// A key tile that is visited. Its classes, two bits for each group of rows that asks for itself, are not all 0; those of none are.
struct Visit {
    i32 tile;
    u32 classes;
};

// `strips` times `strip_rows` query rows of a work ask each for themselves.
template <int strips, int strip_rows>
struct Scan {
    static constexpr i32 together = 32 * cfg::tile_kv;  // keys
    const Mask& mask;
    const Rows& rows;
    const i32 head, q_begin;
    i32 region, group = -1;               // the next 32 groups of 32 tiles; the group at hand
    u32 groups = 0, tiles = 0, mine = 0;  // those of the region and of the group that are left; the classes of this lane's tile

    __device__ Scan(const Mask& mask, const Rows& rows, i32 head, i32 q_begin)
        : mask(mask), rows(rows), head(head), q_begin(q_begin), region(ceil_div(ceil_div(rows.kv_len, together), 32)) {}

    __device__ u32 classes_of(i32 tile) const {
        u32 found = 0;
#pragma unroll 1
        for (i32 i = 0; i < strips; ++i)
            found |= u32(classify(mask, rows, head, q_begin + i * strip_rows, strip_rows, tile * cfg::tile_kv, cfg::tile_kv)) << 2 * i;
        return found;
    }
    // By the whole warp.
    __device__ Visit next() {
        const i32 lane = threadIdx.x % 32;
        while (!tiles) {
            while (!groups) {
                if (region-- == 0) return {0, 0};
                const i32 first = (region * 32 + 31 - lane) * together;
                groups = __ballot_sync(0xffffffffu, classify(mask, rows, head, q_begin, strips * strip_rows, first, together) != 0);
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
