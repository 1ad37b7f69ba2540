#pragma once
// The same in small pages, each of which is a box of all columns (tile/grouped_tile.cuh): a lane looks up one of them. Rows of a page past
// the sequence's end arrive as zeros, by boxes for each panel of eight rows.
#include "ptx/elect.cuh"
#include "tile/checked_page.cuh"
#include "tile/grouped_tile.cuh"
#include "tile/page_boxes.cuh"
#include "tile/keys.cuh"
#include "tile/page_rows.cuh"
#include "variant/latent_loads.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct LatentBoxesKv {
    template <int rows, int columns> using Tile = GroupedTile<rows, columns>;
    template <class Kv, class Tile> using Contract = LatentKvOption<Kv, Tile>;
    using Loads = LoadedByWarp<LatentBoxesKv>;
    static constexpr i32 boxes = cfg::tile_kv / cfg::page_rows, groups = cfg::page_rows / 8;  // of a tile; of a box
    static_assert(boxes <= 32 && cfg::page_rows % 8 == 0);

    const Args& args;
    const Pages pages;
    const KeysFrom keys;

    __device__ LatentBoxesKv(const Args& args, const WorkTile& work, const KeysFrom& keys) : args(args), pages(args, work), keys(keys) {}

    __device__ static void prefetch(const Args& args) { ptx::prefetch(args.k.map); }
    // All bytes complete on the first barrier.
    template <int, class Tile>
    __device__ void load(Tile& tile, ptx::Mbarrier (&full)[2], i32 index) const {
        const i32 lane = threadIdx.x % 32, key = index * cfg::tile_kv + lane % boxes * cfg::page_rows;
        const i32 found = keys.has_any(key, cfg::page_rows) ? pages.page(args, key, args.k.count) : args.k.count;
        const i32 page = found < args.k.count ? found : -1, place = args.k.place(page, 0);
        const i32 there = keys.end - index * cfg::tile_kv, cut = there > 0 && there < cfg::tile_kv && there % cfg::page_rows ? there / cfg::page_rows : boxes;
        __syncwarp();
        if (lane == 0) full[0].arrive_expect(Tile::bytes), full[1].arrive();
        __syncwarp();
#pragma unroll
        for (i32 i = 0; i < boxes; ++i) {
            const i32 from = ptx::from_lane(place, i);
            if (i != cut && ptx::elect()) args.k.load_once(tile.data[i * groups], full[0], from);
        }
        if (cut < boxes) load_cut(tile, full[0], cut, ptx::from_lane(page, cut), there % cfg::page_rows);
        __syncwarp();
    }
    // The first `rows` rows of a page.
    template <class Tile>
    __device__ void load_cut(Tile& tile, ptx::Mbarrier& full, i32 box, i32 page, i32 rows) const {
#pragma unroll 1
        for (i32 i = threadIdx.x % 32; i < groups * Tile::panels; i += 32) {
            const i32 group = i / Tile::panels, panel = i % Tile::panels;
            const i32 inside = page < 0 ? 0 : max(0, min(rows - group * 8, 8));
            args.k_end.load(tile.data[box * groups + group][panel], full, max(0, page), group * 8, inside, panel * 64, 0);
        }
    }
};
