#pragma once
// Who loads the stages of attn_mla.cu, and what comes to each: Q of a work, then the tiles of its splits. Smem has the members that are
// named here. Positions lie in shared memory, as registers are few.
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "tile/splits.cuh"
#include "variant/interfaces.cuh"

// The key tiles of a split: one without keys, where it has none of the rows' own.
struct Span {
    i32 tile, end;

    template <class Work>
    __device__ Span(const Work& work, i32 split)
        : tile(max(work.place.tiles.begin, split << work.shift)), end(min(work.place.tiles.end, (split + 1) << work.shift)) {
        if (tile >= end) tile = behind_all, end = behind_all + 1;
    }
};

// Nothing is asked for by warpgroup 0.
struct NoneAskedFor {
    template <class Smem>
    __device__ static void ask(const Args&, Smem&, const Ring<Smem::stages>&) {}
    __device__ static constexpr bool comes() { return false; }
};

// A warp of those that multiply by values loads for all, by TMA.
template <class Kv>
struct LoadedByWarp {
    using Barrier = ptx::Mbarrier;
    using Asks = NoneAskedFor;
    static constexpr u32 arrivals = 1, rest_arrivals = 1;  // of the parts of a stage
    struct Board { i32 count, split, tile; };  // works before, -1 behind the last; tile -1 for Q
    const bool loads = ptx::uniform(threadIdx.x / 32) == 4;

    __device__ static void init(Board& board) { board = {0, 0, -1}; }
    // What products must see of the first panels, which have come, and of the last.
    __device__ static void fence_first() {}
    __device__ static void fence() {}
    // What is done to tiles behind a stage, while its products run.
    template <class Smem>
    __device__ static void work(Smem&, const Ring<Smem::stages>&, bool, bool) {}
    // The first stages.
    template <class Smem>
    __device__ void begin(const Args& args, Smem& smem) const {
        if (loads)
            for (u32 i = 0; i < Smem::stages; ++i) next(args, smem, i);
    }
    // A stage that was given back.
    template <class Smem>
    __device__ void load(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) const {
        if (!loads) return;
        smem.empty[ring.stage].wait(ring.parity);
        __syncwarp();
        next(args, smem, ring.stage);
    }
    // Loads what comes to a stage next, if anything does.
    template <class Smem>
    __device__ static void next(const Args& args, Smem& smem, u32 stage) {
        Board& next = smem.loader;
        const i32 count = ptx::from_lane(next.count, 0), tile = ptx::from_lane(next.tile, 0), split = ptx::from_lane(next.split, 0);
        if (count < 0) return;
        const auto& work = smem.work[count % 2];
        const bool leads = threadIdx.x % 32 == 0;
        if (tile < 0) {
            smem.work_full[count % 2].wait(count / 2 & 1);
            __syncwarp();
            if (leads) {
                if (work.batch < 0) next.count = -1;
                else {
                    smem.full[stage][0].arrive(), smem.full[stage][1].arrive();
                    next.split = work.split, next.tile = Span(work, work.split).tile;
                }
            }
        } else {
            const i32 first_key = ptx::from_lane(work.place.first_key, 0), kv_len = ptx::from_lane(work.place.kv_len, 0);
            const KeysFrom keys = {{kv_len}, first_key};
            Kv(args, WorkTile{ptx::from_lane(work.batch, 0), 0, 0, 0}, keys).template load<Smem::first_panels>(smem.ring[stage], smem.full[stage], tile);
            if (leads) {
                if (tile + 1 < Span(work, split).end) next.tile = tile + 1;
                else if (split + 1 < work.split_end) next.split = split + 1, next.tile = Span(work, split + 1).tile;
                else next.count = count + 1, next.tile = -1;
            }
        }
        __syncwarp();
    }
};
