#pragma once
// How a block of the backward goes over the queries of a key tile: the same in all kernels that keep keys stationary.
#include "variant/interfaces_bwd.cuh"

// The steps of a work: the query tiles that keep keys of its tile, for one query head after the other.
struct Walk {
    TileRange tiles;
    i32 ascends, tile, left, head;

    __device__ Walk(const Args& args, const Rows& rows, const Mask& mask, const KvWorkTile& work)
        : tiles(mask.q_tiles(work.kv_tile * cfg::tile_kv, min((work.kv_tile + 1) * cfg::tile_kv, rows.kv_len))),
          ascends(work.q_ascends), tile(first()), left((tiles.end - tiles.begin) * args.heads_per_kv), head(work.kv_head * args.heads_per_kv) {
        if ((work.kv_tile + 1) * cfg::tile_kv > rows.kv_len) tiles.full_begin = tiles.full_end;  // keys past the end are masked, too
    }
    __device__ i32 first() const { return ascends ? tiles.begin : tiles.end - 1; }
    __device__ bool is_full() const { return tiles.is_full(tile); }
    __device__ void advance() {
        --left;
        tile += ascends ? 1 : -1;
        if (tile == tiles.end || tile < tiles.begin) tile = first(), ++head;
    }
};
