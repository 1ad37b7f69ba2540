#pragma once
// This is how the keys of one sequence are split. Borders are multiples of a power of two, which follows from the sequence's own length and
// from constants of the model, powers of two themselves: what a row's splits are, and in which order they are folded, is the same in
// any batch, on any grid and for any pages, and so are its bits. Splits are folded in groups of `split_group` from left to right,
// then the groups.
#include "tile/range.cuh"

constexpr i32 split_group = 8, tile_kv_log2 = cfg::tile_kv == 64 ? 6 : 5;
constexpr i32 behind_all = (1 << 30) / cfg::tile_kv;  // a key tile that no sequence has
static_assert(1 << tile_kv_log2 == cfg::tile_kv);

// The fewest keys of a split; a quarter as many of sequences above args.long_keys, where a kernel has it.
template <class A>
__device__ inline i32 fewest_keys_log2(const A& args, i32 kv_len) {
    if constexpr (requires { args.long_keys; }) return args.split_keys_log2 - 2 * (kv_len > args.long_keys);
    else return args.split_keys_log2;
}

struct Splits {
    i32 shift;        // a split has 1 << shift key tiles
    i32 first, last;  // key tiles that the sequence visits: [first, last)
    i32 begin, end;   // splits; a sequence that visits nothing has an empty one

    Splits() = default;
    __device__ Splits(const Args& args, i32 kv_len, TileRange visited) : first(visited.begin), last(max(visited.begin, visited.end)) {
        const i32 least = (kv_len + (1 << args.most_splits_log2) - 1) >> args.most_splits_log2;
        shift = max(fewest_keys_log2(args, kv_len), least > 1 ? 32 - __clz(least - 1) : 0) - tile_kv_log2;
        begin = first >> shift, end = max(begin + 1, split_after(last));
    }
    // The first split that begins at a tile or after it.
    __device__ i32 split_after(i32 tile) const { return (tile + (1 << shift) - 1) >> shift; }
    __device__ i32 tiles() const { return 1 << shift; }
    // The tiles of the row's own range in splits [from, to).
    __device__ TileRange clip(TileRange own, i32 from, i32 to) const {
        return {max(own.begin, from << shift), own.full_begin, own.full_end, min(own.end, to << shift)};
    }
    __device__ i32 group_begin(i32 split) const { return max(split / split_group * split_group, begin); }
    __device__ i32 group_end(i32 split) const { return min((split / split_group + 1) * split_group, end); }
    // Key tiles before a split.
    __device__ i32 tiles_before(i32 split) const { return max(0, (split << shift) - first); }
};
