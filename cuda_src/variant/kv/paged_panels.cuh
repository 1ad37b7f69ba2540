#pragma once
// K and V lie in pools of pages, which TMA reads for wgmma: a box for each page of a tile and each of its panels. A lane has the boxes
// of one page. Rows past the sequence's end arrive as zeros: what a page holds there may be NaN, of which a weight of 0 makes NaN.
#include "tile/tile.cuh"
#include "tile/page_rows.cuh"
#include "variant/loads.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedPanelsKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    using Loads = LoadsByTma;
    static constexpr i32 boxes = cfg::tile_kv / cfg::page_rows;
    static_assert(boxes <= 32);
    struct At { i32 tile, page; };  // the page of this lane's rows of the tile, or -1
    struct Board {                  // in shared memory, for this option alone
        __device__ void init() {}
    };

    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedPanelsKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), keys(rows.keys()) {}

    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(threadIdx.x) % boxes * cfg::page_rows; }
    __device__ i32 find(i32 tile) const {
        if (!keys.has_any(key(tile), cfg::page_rows)) return -1;
        const i32 page = pages.page(args, key(tile), args.k.count);
        return page < args.k.count ? page : -1;
    }

    __device__ static i32 page(i32, i32 found) { return found; }
    __device__ static At at(Board&, i32 tile, i32 page) { return {tile, page}; }
    template <class Tile, class Pool>
    __device__ void load(Tile& tile, const Pool& pool, ptx::Mbarrier& full, At at) const {
        const i32 lane = threadIdx.x % 32, rows = at.page < 0 ? 0 : min(keys.end - key(at.tile), cfg::page_rows);
        __syncwarp();  // all lanes have seen the stage free: one that has not would wait for its next turn, which may not come
        if (lane == 0) full.arrive_expect(Tile::bytes);
        if (lane >= boxes) return;
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            pool.load(tile.data[panel] + lane * (cfg::page_rows * 64), full, max(0, at.page), pages.row(key(at.tile)), rows, panel * 64, head);
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, ptx::Mbarrier& full, At at) const { load(tile, args.k, full, at); }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::Mbarrier& full, At at) const { load(tile, args.v, full, at); }
};
