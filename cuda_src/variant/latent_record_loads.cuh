#pragma once
// Who loads the stages of attn_mla.cu where tiles come as records (variant/latent_loads.cuh). Warpgroup 0 asks TMA for those of the next tile
// while Q K^T runs, in which it has nothing else to do. When they have come, all that multiply by values make numbers of them, each warp of
// its own rows, while P V of the tile before runs.
//
//   full[s][1]   a lane of each warp of warpgroup 0, and TMA   who makes numbers   a stage of records; behind it full[s][0] says that they are numbers
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "variant/interfaces.cuh"
#include "variant/latent_loads.cuh"

template <class Kv>
struct RecordsAskedFor {
    LoadPosition next;   // what is asked for next
    RowsAhead<Kv> rows;  // and where that lies

    __device__ static void arrive(ptx::Mbarrier& barrier) {
        if (ptx::lane_id() == 0) barrier.arrive();
    }
    // Asks for what comes to a stage, if anything does, when all have given that back.
    template <class Smem>
    __device__ void ask(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) {
        Position at(next);
        if (at.count < 0) return;
        const auto& work = smem.work[at.count % 2];
        const bool is_q = at.tile < 0;
        if (is_q) {
            smem.work_full[at.count % 2].wait(at.count / 2 & 1);
            __syncwarp();
            if (!at.is_work(smem)) {
                at.count = -1, next = at;
                return;
            }
        }
        smem.empty[ring.stage].wait(ring.parity ^ 1);
        __syncwarp();
        if (!is_q) Kv::load(smem.ring[ring.stage], smem.full[ring.stage][1], rows.row);
        else {  // which comes by itself
#pragma unroll
            for (u32 i = 0; i < Kv::Loads::arrivals / 4; ++i) arrive(smem.full[ring.stage][0]);
            arrive(smem.full[ring.stage][1]);
        }
        at.advance(work), next = at;
        if (at.count >= 0 && at.tile >= 0) rows.look_up(args, work, at, is_q);
        __syncwarp();
    }
    // Whether what is asked for next is a tile.
    __device__ bool comes() const { return next.tile >= 0 && next.of >= 0; }
};

template <class Kv>
struct RecordsMadeByAll {
    using Barrier = ptx::Mbarrier;
    using Asks = RecordsAskedFor<Kv>;
    static constexpr u32 warps = 8, arrivals = warps, rest_arrivals = 4;
    struct Board {};

    __device__ static void init(Board&) {}
    // Those who wrote numbers have seen to it, in the own block.
    __device__ static void fence_first() { Kv::fence(); }
    __device__ static void fence() {}
    template <class Smem>
    __device__ static void begin(const Args&, Smem&) {}
    template <class Smem>
    __device__ static void load(const Args&, Smem&, const Ring<Smem::stages>&) {}
    template <class Smem>
    __device__ static void load_rest(const Args&, Smem&, const Ring<Smem::stages>&) {}
    // Makes numbers of the next tile, where a stage holds Q, and of the one behind it, where that comes.
    template <class Smem>
    __device__ static void work(Smem& smem, Ring<Smem::stages> ring, bool holds_q, bool comes) {
        ring.advance(holds_q ? 1 : 2);
#pragma unroll 1
        for (u32 i = u32(holds_q) + comes; i > 0; --i, ring.advance()) {
            smem.full[ring.stage][1].wait(ring.parity);
            Kv::widen(smem.ring[ring.stage], smem.full[ring.stage][0]);
        }
    }
};
