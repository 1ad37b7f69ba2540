#pragma once
// A mask for one of up to args.splits parts of the key tiles that a work's queries visit, as equal as whole tiles can be, none of less
// than args.split_tiles. They are cut by what the sequence has: its own length, its first key, and a window, where the host knows no
// more than a bound. Works beyond the last part have no tiles.
#include "variant/mask/within_tiles.cuh"

template <class M>
struct SplitTilesMask : WithinTiles<M> {
    __device__ SplitTilesMask(const Args& args, const Rows& rows, const WorkTile& work) : WithinTiles<M>(args, rows, work) {
        if (work.q_begin >= rows.q_len) return;
        const TileRange all = M::kv_tiles(work.q_begin, min(work.q_begin + cfg::tile_q, rows.q_len));
        const i32 count = max(0, all.end - all.begin), parts = max(1, min(args.splits, count / args.split_tiles));
        if (work.split >= parts) return;
        const i32 each = count / parts, more = count % parts;
        this->first = all.begin + work.split * each + min(work.split, more);
        this->last = this->first + each + (work.split < more);
    }
};
