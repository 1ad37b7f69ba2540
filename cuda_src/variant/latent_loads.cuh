#pragma once
// Who loads the stages of attn_mla.cu, and what comes to each: Q of a work, then the tiles of its splits. Smem has the members that are
// named here. Positions lie in shared memory, as registers are few.
#include "ptx/barrier.cuh"
#include "ptx/cp_async_mbarrier.cuh"
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

// A warp of those that multiply by values loads for all, by TMA.
template <class Kv>
struct LoadedByWarp {
    using Barrier = ptx::Mbarrier;
    static constexpr u32 arrivals = 1;          // of a part of a stage
    struct Board { i32 count, split, tile; };  // works before, -1 behind the last; tile -1 for Q
    const bool loads = ptx::uniform(threadIdx.x / 32) == 4;

    __device__ static void init(Board& board) { board = {0, 0, -1}; }
    // What products must see of copies that have come.
    __device__ static void fence() {}
    // What is done to the tiles from so many behind a stage on, while its products run.
    template <class Smem>
    __device__ static void work(const Args&, Smem&, const Ring<Smem::stages>&, u32) {}
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

// All that multiply by values copy rows, 16 bytes at a time. Each warp waits until all have given a stage back, so what the first of them
// has written of the next position before is there, and nobody looks any more at the one that is written then. Where a tile's rows lie
// is looked up while the one before is multiplied.
template <class Kv>
struct LoadedByAll {
    using Barrier = ptx::CopiesMbarrier;
    static constexpr u32 threads = 256, arrivals = threads;
    struct Board {  // of two positions by turns
        i32 tile[2];
        unsigned char split[2];
        signed char count[2];  // works before, modulo 4
    };
    typename Kv::Found found;  // of what comes next, where that is a tile

    __device__ static void init(Board& board) { board.tile[0] = -1, board.split[0] = board.count[0] = 0; }
    // Copies by threads, which have come by a barrier, are seen by products only behind this.
    __device__ static void fence() { ptx::fence_proxy_async(); }
    template <class Smem>
    __device__ static void work(const Args&, Smem&, const Ring<Smem::stages>&, u32) {}
    template <class Smem>
    __device__ void begin(const Args& args, Smem& smem) {
#pragma unroll 1
        for (u32 i = 0; i < Smem::stages; ++i) {
            if (i > 0) ptx::bar_sync(2, threads);
            next(args, smem, i, i & 1);
        }
    }
    template <class Smem>
    __device__ void load(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) {
        smem.empty[ring.stage].wait(ring.parity);
        __syncwarp();
        next(args, smem, ring.stage, ring.stage + ring.parity + 1 & 1);
    }
    template <class Smem>
    __device__ void next(const Args& args, Smem& smem, u32 stage, u32 turn) {
        Board& board = smem.loader;
        i32 count = ptx::from_lane(board.count[turn], 0), tile = ptx::from_lane(board.tile[turn], 0), split = ptx::from_lane(board.split[turn], 0);
        if (count >= 0) {
            const auto& work = smem.work[count % 2];
            if (tile < 0) {
                smem.work_full[count % 2].wait(count / 2 & 1);
                __syncwarp();
                if (ptx::from_lane(work.batch, 0) < 0) count = -1;
                else {
                    smem.full[stage][0].arrive(), smem.full[stage][1].arrive();
                    split = ptx::from_lane(work.split, 0), tile = ptx::from_lane(Span(work, split).tile, 0);
                }
            } else {
                Kv(args, work.batch, work.place).template load<Smem::first_panels>(smem.ring[stage], smem.full[stage], tile, found);
                if (tile + 1 < ptx::from_lane(Span(work, split).end, 0)) ++tile;
                else if (split + 1 < ptx::from_lane(work.split_end, 0)) ++split, tile = ptx::from_lane(Span(work, split).tile, 0);
                else count = count + 1 & 3, tile = -1;
            }
            if (count >= 0 && tile >= 0) found = Kv(args, work.batch, work.place).find(tile);
        }
        if (threadIdx.x == 128) board.tile[turn ^ 1] = tile, board.split[turn ^ 1] = split, board.count[turn ^ 1] = count;
        __syncwarp();
    }
};
