#pragma once
// The same for the blocks of a cluster, each of which brings a part of a tile's rows to all of them.
#include "tile/tma_cluster_page_rows.cuh"
#include "variant/kv/latent_panels.cuh"

template <class Pages>
struct LatentSharedPanelsKv : LatentPanelsKv<Pages> {
    using Base = LatentPanelsKv<Pages>;
    using Base::Base;
    using Loads = LoadedByWarp<LatentSharedPanelsKv>;
    static constexpr i32 box_rows = cfg::tile_kv / cfg::members;

    // Barriers of a block await all of its tile. What others bring may come before it says so: a phase does not end meanwhile, as it awaits
    // the block's own arrival, too.
    template <int first_panels, class Tile>
    __device__ void load(Tile& tile, ptx::Mbarrier (&full)[2], i32 index) const {
        const auto [page, row, rows] = this->find(index);
        if (ptx::elect()) {
            const i32 first = i32(ptx::cluster_rank()) * box_rows;
            full[0].arrive_expect(first_panels * Tile::panel_bytes);
            full[1].arrive_expect((Tile::panels - first_panels) * Tile::panel_bytes);
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                this->args.k.load_all_once(tile.data[panel] + first * 64, full[panel >= first_panels], (1 << cfg::members) - 1, page, row + first,
                                           max(0, rows - first), panel * 64);
        }
        __syncwarp();
    }
};
