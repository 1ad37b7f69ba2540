#pragma once
// How a block of the backward goes over the queries of a key tile: the same in all kernels that keep keys stationary.
#include "variant/interfaces_bwd.cuh"

// The steps of a work: the query tiles that keep keys of its tile, for one query head after the other.
struct Walk {
    const Args& args;
    const Rows& rows;
    const KvWorkTile& work;
    i32 head, last;  // of the group
    TileRange tiles;
    i32 tile;

    __device__ Walk(const Args& args, const Rows& rows, const KvWorkTile& work)
        : args(args), rows(rows), work(work), head(work.kv_head * args.heads_per_kv), last(head + args.heads_per_kv - 1) {
        enter();
    }

    __device__ bool more() const { return head <= last; }
    __device__ bool is_full() const { return tiles.is_full(tile); }
    __device__ WorkTile work_tile() const { return {work.batch, head, tile * cfg::tile_q, 0}; }
    __device__ void advance() {
        tile += work.q_ascends ? 1 : -1;
        if (tile == tiles.end || tile < tiles.begin) ++head, enter();
    }
    // Goes to the first step of this head, or of the next one that has any.
    __device__ void enter() {
        for (; more(); ++head) {
            const WorkTile of_head = {work.batch, head, 0, 0};
            tiles = Mask(args, rows, of_head).q_tiles(work.kv_tile * cfg::tile_kv, (work.kv_tile + 1) * cfg::tile_kv);
            tile = work.q_ascends ? tiles.begin : tiles.end - 1;
            if (tiles.begin < tiles.end) return;
        }
    }
};
