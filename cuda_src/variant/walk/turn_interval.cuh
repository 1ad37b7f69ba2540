#pragma once
// Whose turn it is to add to a tile of dq: contributors 0 to `last`, in the order of their key tiles, which lie side by side. A counter
// of the tile says how many have added.
#include "variant/interfaces_bwd.cuh"
#include "variant/walk/key_interval.cuh"

struct IntervalTurn {
    struct Seen {};  // what the counter said then
    i32 number, last;

    __device__ static IntervalTurn of(const Mask& mask, const Rows& rows, const KvWorkTile& work, i32 q_tile) {
        const TileRange keys = mask.kv_tiles(q_tile * cfg::tile_q, min((q_tile + 1) * cfg::tile_q, rows.q_len));
        return {work.kv_ascends ? work.kv_tile - keys.begin : keys.end - 1 - work.kv_tile, keys.end - 1 - keys.begin};
    }
    __device__ static i32 first(const Mask&, const Rows&, const WorkTile&) { return 0; }
    __device__ bool has_come(i32 count) const { return count == number; }
    __device__ void see(Seen&, i32) const {}
    __device__ bool is_first(Seen) const { return number == 0; }
    __device__ bool is_last() const { return number == last; }
    __device__ i32 next() const { return number + 1; }
};
