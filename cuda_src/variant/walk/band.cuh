#pragma once
// The key tiles whose band has a query tile: those whose first query tile lies `band` to `band` + 1 times args.part_tiles tiles before it.
#include "variant/walk/key_interval.cuh"

template <class A>
__device__ inline TileRange tiles_of_band(const A& args, const Rows& rows, const Mask& mask, i32 q_tile, i32 band) {
    const auto end = [&](i32 tile) { return tile < 0 ? 0 : tiles_of(mask, rows, tile * cfg::tile_q, cfg::tile_q).end; };
    const i32 nearest = q_tile - band * args.part_tiles;
    return {end(nearest - args.part_tiles), 0, 0, end(nearest)};
}
