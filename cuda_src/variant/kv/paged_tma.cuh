#pragma once
// K and V lie in pools of pages, which TMA reads: a box for each page of a tile, or for the whole tile where a page has as many rows.
#include "tile/pages.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedTmaKv {
    using Barrier = ptx::Mbarrier;
    static constexpr u32 arrivals = 1;  // on a barrier, for a tile
    static constexpr i32 boxes = cfg::tile_kv / cfg::page_rows;

    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedTmaKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head), keys(rows.keys()) {}

    // The first key of this lane's box, and its page: the first lanes have boxes of K, as many others those of V.
    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(threadIdx.x) % boxes * cfg::page_rows; }
    __device__ i32 find(i32 tile) const { return keys.has_any(key(tile), cfg::page_rows) ? pages.page(args, key(tile), args.k.count) : args.k.count; }

    // Brings a tile to L2, while the launch before may still run.
    __device__ void prefetch(i32 tile) const {
        const i32 lane = threadIdx.x % 32, row = pages.row(key(tile));
        const i32 page = keys.has_any(key(tile), cfg::page_rows) ? pages.early_page(args, key(tile), args.k.count) : args.k.count;
        if (page == args.k.count) return;
        if (lane < boxes) args.k.prefetch(page, row, head);
        else if (lane < 2 * boxes) args.v.prefetch(page, row, head);
    }
    template <class KTile, class VTile>
    __device__ void load(KTile& k, VTile& v, Barrier& k_full, Barrier& v_full, i32 tile, i32 page) const {
        const i32 lane = threadIdx.x % 32, row = pages.row(key(tile));
        if (lane == 0) k_full.arrive_expect(KTile::bytes), v_full.arrive_expect(VTile::bytes);
        if (lane < boxes) args.k.load(k.box(lane), k_full, page, row, head);
        else if (lane < 2 * boxes) args.v.load(v.box(lane - boxes), v_full, page, row, head);
    }
    // A tile without its bytes.
    __device__ static void pass(Barrier& k_full, Barrier& v_full) {
        if (threadIdx.x % 32 == 0) k_full.arrive(), v_full.arrive();
    }
    __device__ static void fence_barriers() { ptx::fence_mbarrier_init(); }
    // Before a stage is given back: what this thread reads of it may still be on its way, and the barrier alone does not hold TMA back.
    __device__ static void fence_reads() { ptx::fence_proxy_async(); }
    __device__ static void prefetch(const Args& args) { ptx::prefetch(args.k.map), ptx::prefetch(args.v.map); }

    // What a page holds besides the sequence's keys may be NaN, of which a weight of 0 makes NaN.
    template <class VTile>
    __device__ static void clear_others(VTile& v, const Rows::Keys& there) {
        there.clear_others(v);
        ptx::fence_proxy_async();
        __syncwarp();
    }
};
