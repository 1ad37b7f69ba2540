#pragma once
// The key tiles of a step's rows lie side by side: a block loads and computes all tiles of its splits (attn_decode.cu).
#include "variant/walk/key_interval.cuh"

struct SplitIntervalWalk {
    struct Board {};  // consumers need not be told

    // The tiles of rows [work.q_begin, end).
    __device__ static TileRange span(const Args& args, const Rows& rows, const WorkTile& work, i32 end) {
        return Mask(args, rows, work).kv_tiles(work.q_begin, end);
    }

    // By a whole warp of producers.
    __device__ SplitIntervalWalk(const Mask&, const Rows&, const WorkTile&) {}
    __device__ static constexpr i32 classify(i32) { return 1; }
    __device__ static constexpr i32 where(i32 tile, i32) { return tile; }
    __device__ static void tell(Board&, u32, i32) {}

    // By consumers, of a tile that is there: 0, 1 or 2, as of a mask's classify.
    __device__ static i32 told(const Board&, u32, const TileRange& tiles, i32 tile) { return 1 + tiles.is_full(tile); }
};
