#pragma once
// K and V tiles take turns in the slots of a ring.
#include "tile/swizzled.cuh"

struct Turns {
    static constexpr int each = 2;  // slots of a key tile
    using KTile = SwizzledTile<cfg::tile_kv, cfg::head_dim, sizeof(Element)>;
    using VTile = SwizzledTile<cfg::tile_kv, cfg::head_dim_v, sizeof(Element)>;
    union Slot {
        KTile k;
        VTile v;
    };

    // Starts the load of a key tile's K (which = 0) or V (1).
    template <class Kv>
    __device__ static void load(const Kv& kv, Slot& slot, int which, i32 index) {
        if (which == 0) kv.load_k(slot.k, index);
        else kv.load_v(slot.v, index);
    }
    // What a thread loaded is there.
    template <class Kv>
    __device__ static void finish(const Kv&, Slot&) {}
};
