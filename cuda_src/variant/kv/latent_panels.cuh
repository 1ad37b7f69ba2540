#pragma once
// A cache whose values are the first columns of its keys, so that a tile is both: in pages that TMA reads for wgmma, each a tile's rows
// or more. A tile's panels come in two parts, each with a barrier, and one lane issues all boxes. Rows past the sequence's end arrive as
// zeros: what a page holds there may be NaN, of which a weight of 0 makes NaN.
#include "ptx/elect.cuh"
#include "tile/checked_page.cuh"
#include "tile/keys.cuh"
#include "tile/page_rows.cuh"
#include "tile/tile.cuh"
#include "variant/latent_loads.cuh"
#include "variant/work_tile.cuh"

template <class Pages>
struct LatentPanelsKv {
    template <int rows, int columns> using Tile = ::Tile<rows, columns>;
    template <class Kv, class Tile> using Contract = LatentKvOption<Kv, Tile>;
    using Loads = LoadedByWarp<LatentPanelsKv>;
    static_assert(cfg::page_rows == cfg::tile_kv);

    const Args& args;
    const Pages pages;
    const KeysFrom keys;

    __device__ LatentPanelsKv(const Args& args, const WorkTile& work, const KeysFrom& keys) : args(args), pages(args, work), keys(keys) {}

    __device__ static void prefetch(const Args& args) { ptx::prefetch(args.k.map); }
    // Where a tile's rows lie, the same in all lanes of a warp; a page that the pool has not has no rows.
    struct Found {
        i32 page, row, rows;
    };
    __device__ Found find(i32 index) const {
        const i32 key = index * cfg::tile_kv;
        const i32 found = keys.has_any(key, cfg::page_rows) ? pages.page(args, key, args.k.count) : args.k.count;
        const i32 page = ptx::from_lane(found < args.k.count ? found : 0, 0);
        const i32 rows = ptx::from_lane(found < args.k.count ? min(keys.end - key, cfg::page_rows) : 0, 0);
        return {page, ptx::from_lane(pages.row(key), 0), rows};
    }
    // Starts the copies of a tile, of whose panels the first `first_panels` complete on `full[0]`.
    template <int first_panels, class Tile>
    __device__ void load(Tile& tile, ptx::Mbarrier (&full)[2], i32 index) const {
        const auto [page, row, rows] = find(index);
        if (ptx::elect()) {
            full[0].arrive_expect(first_panels * Tile::panel_bytes);
            full[1].arrive_expect((Tile::panels - first_panels) * Tile::panel_bytes);
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                args.k.load_once(tile.data[panel], full[panel >= first_panels], page, row, rows, panel * 64);
        }
        __syncwarp();
    }
};
