#pragma once
// The key tiles that the lists of blocks of a tile of queries name, in the lists' order, each as often as it is listed: those of which the
// mask keeps a key. A block of keys is one or several tiles, and a list is that of all rows, or of 64 of them and more.
#include "variant/lists/list_of_block.cuh"
#include "variant/walk/key_interval.cuh"
#include "variant/walk/visit.cuh"

// Those of one list, by a whole warp: its rows are those of warpgroups [first, first + count) of the block.
template <class L, i32 count>
struct BlockTiles {
    const Args& args;
    const KeyList<L> list;
    const i32 first;
    TileRange ranges[count];
    i32 begin = 0;  // of the tiles that are looked at next, along the list
    u32 left = 0;   // of the last 32
    Visit mine;     // this lane's of these

    __device__ BlockTiles(const Args& args, const Rows& rows, const Mask& mask, const WorkTile& work, i32 first)
        : args(args), list(list_of_block<L>(args, work.batch, work.head, (work.q_begin + 64 * first) / cfg::listed_block_q, rows.q_len, rows.kv_len)),
          first(first) {
#pragma unroll
        for (i32 i = 0; i < count; ++i) ranges[i] = tiles_of(mask, rows, work.q_begin + 64 * (first + i), 64);
        list.check_count(args);
    }
    // The classes of the warpgroups' rows, as of Mask::classify.
    __device__ u32 classes_of(i32 tile) const {
        u32 found = 0;
#pragma unroll
        for (i32 i = 0; i < count; ++i)
            if (tile >= ranges[i].begin && tile < ranges[i].end) found |= (ranges[i].is_full(tile) ? 2u : 1u) << 2 * (first + i);
        return found;
    }
    __device__ Visit next() {
        for (; !left; begin += 32) {
            if (begin * cfg::tile_kv >= list.end()) return {0, 0};
            const i32 key = (begin + i32(threadIdx.x) % 32) * cfg::tile_kv, place = key < list.end() ? list.checked_place(args, key) : -1;
            mine = {place / cfg::tile_kv, place < 0 ? 0 : classes_of(place / cfg::tile_kv)};
            left = __ballot_sync(0xffffffffu, mine.classes != 0);
        }
        const i32 bit = __ffs(left) - 1;
        left &= left - 1;
        return {__shfl_sync(0xffffffffu, mine.tile, bit), __shfl_sync(0xffffffffu, mine.classes, bit)};
    }
};
