#pragma once
// K and V lie in pools of small pages, which TMA reads for wgmma: a box for each page of a tile. Each lane looks up one of the pages, and
// one lane issues the boxes of a whole tile. Values past the sequence's end arrive as zeros, by boxes for each panel of eight rows: what
// a page holds there may be NaN, of which a weight of 0 makes NaN.
#include "ptx/elect.cuh"
#include "tile/checked_page.cuh"
#include "tile/grouped_tile.cuh"
#include "tile/page_boxes.cuh"
#include "tile/page_rows.cuh"
#include "variant/loads.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct PagedBoxesKv {
    template <int rows, int columns> using Tile = GroupedTile<rows, columns>;
    using Loads = LoadsByTma;
    static constexpr i32 boxes = cfg::tile_kv / cfg::page_rows, groups = cfg::page_rows / 8;  // of a tile; of a box
    static_assert(boxes <= 32 && cfg::page_rows % 8 == 0);
    struct At { i32 tile, page; };  // the page of this lane's rows of the tile, or -1
    struct Board {  // in shared memory, for this option alone
        __device__ void init() {}
    };

    const Args& args;
    const Pages pages;
    const i32 head;
    const Rows::Keys keys;

    __device__ PagedBoxesKv(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), pages(args, work), head(work.head / args.heads_per_kv), keys(rows.keys()) {}

    __device__ static i32 key(i32 tile) { return tile * cfg::tile_kv + i32(threadIdx.x) % boxes * cfg::page_rows; }
    __device__ bool has_any(i32 tile) const { return keys.has_any(key(tile), cfg::page_rows); }
    // What the table says of this lane's rows. It is on its way until `page` looks at it.
    __device__ i32 find(i32 tile) const { return has_any(tile) ? pages.entry(args, key(tile)) : -1; }
    __device__ i32 page(i32 tile, i32 entry) const {
        if (!has_any(tile)) return -1;
        const i32 found = checked_page(args.violations, entry, args.k.count);
        return found < args.k.count ? found : -1;
    }
    __device__ static At at(Board&, i32 tile, i32 page) { return {tile, page}; }

    template <class Tile>
    __device__ void load(Tile& tile, const TmaPageBoxes& pool, ptx::Mbarrier& full, At at) const {
        constexpr i32 at_once = 4;  // more would spill
        const i32 place = pool.place(at.page, head);
        __syncwarp();
        if (threadIdx.x % 32 == 0) full.arrive_expect(Tile::bytes);
#pragma unroll 1
        for (i32 i = 0; i < boxes; i += at_once) {
            i32 from[at_once];
#pragma unroll
            for (i32 j = 0; j < at_once; ++j) from[j] = ptx::from_lane(place, i + j);
            if (ptx::elect())
#pragma unroll
                for (i32 j = 0; j < at_once; ++j)
                    if (boxes % at_once == 0 || i + j < boxes) pool.load(tile.data[(i + j) * groups], full, from[j]);
        }
        __syncwarp();
    }
    template <class Tile>
    __device__ void load_k(Tile& tile, ptx::Mbarrier& full, At at) const { load(tile, args.k, full, at); }
    template <class Tile>
    __device__ void load_v(Tile& tile, ptx::Mbarrier& full, At at) const {
        const i32 there = keys.end - at.tile * cfg::tile_kv;
        if (there < 0 || there >= cfg::tile_kv || there % cfg::page_rows == 0) return load(tile, args.v, full, at);
        const i32 lane = threadIdx.x % 32, cut = there / cfg::page_rows;
        const i32 from = ptx::from_lane(at.page, cut);
        if (lane == 0) full.arrive_expect(Tile::bytes);
        if (lane < boxes && lane != cut) args.v.load(tile.data[lane * groups], full, args.v.place(at.page, head));
        const i32 group = lane / Tile::panels, panel = lane % Tile::panels;
        const i32 rows = from < 0 ? 0 : max(0, min(there % cfg::page_rows - group * 8, 8));
        if (group < groups) args.v_end.load(tile.data[cut * groups + group][panel], full, max(0, from), group * 8, rows, panel * 64, head);
        __syncwarp();
    }
};
