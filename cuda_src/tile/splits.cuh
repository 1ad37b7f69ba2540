#pragma once
// How the keys of one sequence are split. Borders are multiples of a power of two, which follows from the sequence's own length and
// from constants of the model: what a row's splits are, and in which order they are folded, is the same in any batch, on any grid
// and for any pages, and so are its bits. Splits are folded in groups of `split_group` from left to right, then the groups.
#include "tile/range.cuh"

constexpr i32 split_group = 8;

struct Splits {
    i32 tiles;        // key tiles of a split
    i32 first, last;  // key tiles that the sequence visits: [first, last)
    i32 begin, end;   // splits; a sequence that visits nothing has an empty one

    __device__ Splits(const Args& args, i32 kv_len, TileRange visited) : first(visited.begin), last(max(visited.begin, visited.end)) {
        const i32 least = ceil_div(kv_len, args.most_splits);
        tiles = max(args.split_keys, least > 1 ? 1 << (32 - __clz(least - 1)) : 1) / cfg::tile_kv;
        begin = first / tiles, end = max(begin + 1, ceil_div(last, tiles));
    }
    // The tiles of the row's own range in splits [from, to).
    __device__ TileRange clip(TileRange own, i32 from, i32 to) const {
        return {max(own.begin, from * tiles), own.full_begin, own.full_end, min(own.end, to * tiles)};
    }
    __device__ i32 group_begin(i32 split) const { return max(split / split_group * split_group, begin); }
    __device__ i32 group_end(i32 split) const { return min((split / split_group + 1) * split_group, end); }
    // Key tiles before a split.
    __device__ i32 tiles_before(i32 split) const { return max(0, split * tiles - first); }
};
