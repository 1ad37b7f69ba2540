#pragma once
// K and V lie in pools of small pages, which TMA reads: a box for each page of a tile. Each lane looks up one of the pages, and one lane
// issues all boxes.
#include "ptx/elect.cuh"
#include "tile/checked_page.cuh"
#include "variant/kv/paged_tma.cuh"

template <class Pages>
struct SmallPagesTmaKv : PagedTmaKv<Pages> {
    using Base = PagedTmaKv<Pages>;
    using Base::Base, Base::boxes, Base::key, Base::keys, Base::pages, Base::args, Base::head;
    using Barrier = ptx::Mbarrier;

    // What the table says. Nothing is asked of it before the page is loaded: it is on its way until then.
    __device__ i32 find(i32 tile) const { return keys.has_any(key(tile), cfg::page_rows) ? pages.entry(args, key(tile)) : -1; }
    template <class KTile, class VTile>
    __device__ void load(KTile& k, VTile& v, Barrier& k_full, Barrier& v_full, i32 tile, i32 entry) const {
        const bool there = keys.has_any(key(tile), cfg::page_rows);
        const i32 page = there ? checked_page(args.violations, entry, args.k.count) : args.k.count;
        __syncwarp();
        i32 from[boxes];
#pragma unroll
        for (i32 i = 0; i < boxes; ++i) from[i] = ptx::from_lane(page, i);
        if (ptx::elect()) {
            k_full.arrive_expect(KTile::bytes), v_full.arrive_expect(VTile::bytes);
#pragma unroll
            for (i32 i = 0; i < boxes; ++i) args.k.load(k.box(i), k_full, from[i], 0, head);
#pragma unroll
            for (i32 i = 0; i < boxes; ++i) args.v.load(v.box(i), v_full, from[i], 0, head);
        }
        __syncwarp();
    }
};
