#pragma once
// K and V as TMA reads them; counts the tiles.
#include "variant/kv/tma.cuh"

struct CountedKv : TmaKv {
    using TmaKv::TmaKv;

    template <class Tile>
    __device__ void load_k(Tile& tile, ptx::Mbarrier& full, i32 index) const { atomicAdd(args.tiles_loaded, 1), TmaKv::load_k(tile, full, index); }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::Mbarrier& full, i32 index) const { atomicAdd(args.tiles_loaded, 1), TmaKv::load_v(tile, full, index); }
};
