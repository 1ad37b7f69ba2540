#pragma once
// The key tiles of a step's rows are a list with holes: producers ask the mask for 32 tiles of their splits at a time, load those that
// are kept, and tell the consumers of each what it is. Tiles keep their numbers and places, so that a row's bits are the same in any
// batch: one that is left out passes through the ring without its bytes (attn_decode.cu).
#include "tile/splits.cuh"
#include "variant/walk/scan.cuh"

struct SplitListWalk {
    struct Board { i32 classes[cfg::stages]; };  // written before the barrier of the stage's K, and free with it

    // Those among which the tiles of rows [work.q_begin, end) are. The mask is not asked: what it captured may still be written.
    __device__ static TileRange span(const Args&, const Rows& rows, const WorkTile& work, i32 end) {
        if (work.q_begin >= end) return {0, 0, 0, 0};
        return {rows.keys().first() / cfg::tile_kv, 0, 0, ceil_div(rows.kv_len, cfg::tile_kv)};
    }
    const KeyTiles line;
    i32 group = -1, mine = 0;  // the 32 tiles at hand; the class of this lane's

    __device__ SplitListWalk(const Mask& mask, const Rows& rows, const WorkTile& work)
        : line(mask, rows, work.head, work.q_begin, cfg::tile_q) {}

    __device__ i32 classify(i32 tile) {
        if (tile / 32 != group) group = tile / 32, mine = line.classify(group * 32 + i32(threadIdx.x) % 32);
        return __shfl_sync(0xffffffffu, mine, tile % 32);
    }
    // A tile behind all sequences in place of one that is left out: its pages are not looked up.
    __device__ static i32 where(i32 tile, i32 found) { return found ? tile : behind_all; }
    __device__ static void tell(Board& board, u32 stage, i32 found) {
        if (threadIdx.x != 0) return;
        board.classes[stage] = found;
        __threadfence_block();  // copies that arrive on a barrier by themselves order nothing else
    }
    __device__ static i32 told(const Board& board, u32 stage, const TileRange&, i32) { return board.classes[stage]; }
};
