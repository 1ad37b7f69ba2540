#pragma once
// V is the first columns of K: a key tile has one slot, whose numbers may need a last touch by those who loaded them.
#include "tile/swizzled.cuh"

struct VInK {
    static constexpr int each = 1;
    using KTile = SwizzledTile<cfg::tile_kv, cfg::head_dim, sizeof(Element)>;
    struct VTile : KTile {
        static constexpr int blocks = cfg::head_dim_v / 16, chunks = blocks * sizeof(Element);
        static_assert(cfg::head_dim_v % 16 == 0 && blocks <= KTile::blocks, "whole blocks of K's");
    };
    union Slot {
        KTile k;
        VTile v;
    };

    template <class Kv>
    __device__ static void load(const Kv& kv, Slot& slot, int, i32 index) { kv.load_k(slot.k, index); }
    template <class Kv>
    __device__ static void finish(const Kv& kv, Slot& slot) { kv.widen(slot.k); }
};
