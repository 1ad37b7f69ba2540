#pragma once
// The same for the blocks of a cluster, each of which brings a part of a tile's rows to all of them.
#include "tile/tma_cluster_page_rows.cuh"
#include "variant/kv/latent_panels.cuh"

template <class Pages>
struct LatentSharedPanelsKv : LatentPanelsKv<Pages> {
    using Base = LatentPanelsKv<Pages>;
    using Base::Base;
    using typename Base::Found;
    using Loads = LoadedAhead<LatentSharedPanelsKv>;
    static constexpr i32 box_rows = cfg::tile_kv / cfg::members;

    template <int first_panels, class Tile>
    __device__ void load(Tile& tile, ptx::Mbarrier (&full)[2], i32 index) const { issue<first_panels>(this->args, tile, full, this->find(index)); }
    // Barriers of a block await all of its tile. What others bring may come before it says so: a phase does not end meanwhile, as it awaits
    // the block's own arrival, too.
    template <int first_panels, class Tile>
    __device__ static void issue(const Args& args, Tile& tile, ptx::Mbarrier (&full)[2], const Found& found) {
        if (ptx::elect()) {
            const i32 first = i32(ptx::cluster_rank()) * box_rows;
            full[0].arrive_expect(first_panels * Tile::panel_bytes);
            full[1].arrive_expect((Tile::panels - first_panels) * Tile::panel_bytes);
#pragma unroll
            for (int panel = 0; panel < Tile::panels; ++panel)
                args.k.load_all_once(tile.data[panel] + first * 64, full[panel >= first_panels], (1 << cfg::members) - 1, found.page, found.row + first,
                                     max(0, found.rows - first), panel * 64);
        }
        __syncwarp();
    }
};
