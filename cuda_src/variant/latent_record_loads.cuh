#pragma once
// Who makes numbers of records, for which warpgroup 0 of attn_mla.cu has asked (variant/latent_asks.cuh): all that multiply by values, each
// warp of its own rows, while P V of the tile before runs.
//
//   full[s][1]   a lane of each warp of warpgroup 0, and TMA   who makes numbers   a stage of records; behind it full[s][0] says that they are numbers
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "variant/interfaces.cuh"
#include "variant/latent_asks.cuh"

template <class Kv>
struct RecordsMadeByAll {
    using Barrier = ptx::Mbarrier;
    using Asks = AskedFor<Kv>;
    static constexpr u32 warps = 8, arrivals = warps, rest_arrivals = 4;
    struct Board {};

    __device__ static void init(Board&) {}
    // Those who wrote numbers have seen to it, in the own block.
    __device__ static void fence_first() { Kv::fence(); }
    __device__ static void fence() {}
    __device__ static void arrive(Barrier (&full)[2]) {
        if (ptx::lane_id() > 0) return;
#pragma unroll
        for (u32 i = 0; i < arrivals / rest_arrivals; ++i) full[0].arrive();
        full[1].arrive();
    }
    template <class Smem>
    __device__ static void begin(const Args&, Smem&) {}
    template <class Smem>
    __device__ static void load(const Args&, Smem&, const Ring<Smem::stages>&) {}
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
