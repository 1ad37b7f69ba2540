#pragma once
// A warp loads for all, by TMA, and looks up where the next tile lies while products run that read the stage it will come to.
#include "variant/latent_loads.cuh"

template <class Kv>
struct LoadedAhead : LoadedByWarp<Kv> {
    using Base = LoadedByWarp<Kv>;
    typename Kv::Found found;  // of what comes next, where that is a tile

    template <class Smem>
    __device__ void load_rest(const Args& args, const Smem& smem, const Ring<Smem::stages>&) {
        if (!this->loads) return;
        const i32 count = ptx::from_lane(smem.loader.count, 0), tile = ptx::from_lane(smem.loader.tile, 0);
        if (count < 0 || tile < 0) return;
        const auto& work = smem.work[count % 2];
        const KeysFrom keys = {{ptx::from_lane(work.place.kv_len, 0)}, ptx::from_lane(work.place.first_key, 0)};
        found = Kv(args, WorkTile{ptx::from_lane(work.batch, 0), 0, 0, 0}, keys).find(tile);
    }
    // A stage that was given back, behind load_rest().
    template <class Smem>
    __device__ void load(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) const {
        if (!this->loads) return;
        typename Base::Board& next = smem.loader;
        const i32 count = ptx::from_lane(next.count, 0), tile = ptx::from_lane(next.tile, 0);
        smem.empty[ring.stage].wait(ring.parity);
        __syncwarp();
        if (count < 0 || tile < 0) return Base::next(args, smem, ring.stage);
        Kv::template issue<Smem::first_panels>(args, smem.ring[ring.stage], smem.full[ring.stage], found);
        if (threadIdx.x % 32 == 0) {
            const auto& work = smem.work[count % 2];
            if (tile + 1 < Span(work, next.split).end) next.tile = tile + 1;
            else if (next.split + 1 < work.split_end) ++next.split, next.tile = Span(work, next.split).tile;
            else next.count = count + 1, next.tile = -1;
        }
        __syncwarp();
    }
};
