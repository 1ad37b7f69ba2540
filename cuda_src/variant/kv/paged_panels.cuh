#pragma once
// K and V lie in pools of pages, which TMA reads for wgmma: a box for each page of a tile and each of its panels. A lane has the boxes
// of one page. Rows past the sequence's end arrive as zeros: what a page holds there may be NaN, of which a weight of 0 makes NaN.
#include "tile/page_rows.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedPanelsKv {
    static constexpr i32 boxes = cfg::tile_kv / cfg::page_rows;
    static_assert(boxes <= 32);
    struct Found {
        i32 tile, page;  // the page of this lane's rows of the tile
        i32 rows;        // that the sequence has of them
    };

    const Args& args;
    const Pages pages;
    const i32 head, kv_len;

    __device__ PagedPanelsKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), kv_len(rows.kv_len) {}

    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(threadIdx.x) % boxes * cfg::page_rows; }
    // By a warp. The tile before the first one has no rows.
    __device__ Found find(i32 tile) const {
        const i32 rows = tile < 0 ? 0 : max(0, min(kv_len - key(tile), cfg::page_rows)), count = args.k.count;
        const i32 page = rows > 0 ? pages.page(args, key(tile), count) : count;
        return {tile, page < count ? page : 0, page < count ? rows : 0};
    }

    template <class Tile>
    __device__ void load(Tile& tile, const TmaPageRows& pool, ptx::Mbarrier& full, const Found& found) const {
        const i32 lane = threadIdx.x % 32;
        if (lane == 0) full.arrive_expect(Tile::bytes);
        if (lane >= boxes) return;
#pragma unroll
        for (int panel = 0; panel < Tile::panels; ++panel)
            pool.load(tile.data[panel] + lane * (cfg::page_rows * 64), full, found.page, pages.row(key(found.tile)), found.rows, panel * 64, head);
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, ptx::Mbarrier& full, const Found& found) const { load(tile, args.k, full, found); }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::Mbarrier& full, const Found& found) const { load(tile, args.v, full, found); }
};
