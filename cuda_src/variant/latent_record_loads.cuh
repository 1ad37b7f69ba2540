#pragma once
// Who loads the stages of attn_mla.cu where tiles come as records (variant/latent_loads.cuh): all that multiply by values, rows of its own each
// warp. The warp looks these up, asks TMA for them when a stage is given back, and makes numbers of them while a product runs, one
// stage later. So records have the time of Q K^T of a tile to come, and are numbers when P V of the next but one before them ends.
//
//   full[s][1]   a lane of each warp, and TMA   who makes numbers   a stage of records; behind it full[s][0] says that they are numbers
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "tile/ring.cuh"
#include "variant/interfaces.cuh"
#include "variant/latent_loads.cuh"

template <class Kv>
struct RecordsLoadedByAll {
    using Barrier = ptx::Mbarrier;
    static constexpr u32 warps = 8, arrivals = warps;
    static constexpr int first_panels = 4;
    struct Board {};
    typename Kv::Row row;  // of what comes next, where that is a tile,
    i32 found;             // what was known of it before,
    LoadPosition next;     // and which it is
    u32 raw = 0;           // stages that hold records, in bits

    __device__ static void init(Board&) {}
    // Those who wrote numbers have seen to it, in the own block.
    __device__ static void fence_first() { Kv::fence(); }
    __device__ static void fence() {}
    template <class Smem>
    __device__ void begin(const Args& args, Smem& smem) {
#pragma unroll 1
        for (u32 i = 0; i < Smem::stages; ++i) {
            look_up(args, smem);
            load_next(args, smem, i, 1);
        }
    }
    template <class Smem>
    __device__ void load(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) { load_next(args, smem, ring.stage, ring.parity); }
    // All is asked for at once.
    template <class Smem>
    __device__ static void load_rest(const Args&, Smem&, const Ring<Smem::stages>&) {}
    // While the products of a stage run, or none do where it holds Q: makes numbers of what was asked for, from so many stages behind it
    // on. With what comes behind Q that is the first tile that a block asks for, too; all others were made a stage ago.
    template <class Smem>
    __device__ void work(const Args& args, Smem& smem, Ring<Smem::stages> ring, u32 behind) {
        look_up(args, smem);
        ring.advance(behind);
#pragma unroll 1
        for (u32 i = behind; i < Smem::stages; ++i, ring.advance()) {
            if (!(ptx::uniform(raw) >> ptx::uniform(ring.stage) & 1)) continue;
            raw ^= 1u << ring.stage;
            smem.full[ring.stage][1].wait(ring.parity);
            Kv::widen(smem.ring[ring.stage], smem.full[ring.stage][0]);
        }
    }
    // Where the records are that come next.
    template <class Smem>
    __device__ void look_up(const Args& args, const Smem& smem) {
        const Position at(next);
        if (at.count < 0 || at.tile < 0) return;
        const auto& work = smem.work[at.count % 2];
        row = Kv(args, work.batch, work.place).row(at.tile, found);
    }
    __device__ static void arrive(Barrier& barrier) {
        __syncwarp();
        if (ptx::lane_id() == 0) barrier.arrive();
    }
    // Asks for what comes to a stage next, if anything does, when all have given the stage back. What comes behind that is found meanwhile.
    template <class Smem>
    __device__ void load_next(const Args& args, Smem& smem, u32 stage, u32 parity) {
        Position at(next);
        const bool is_q = at.tile < 0;
        bool loads = at.count >= 0;
        if (loads) {
            const auto& work = smem.work[at.count % 2];
            if (is_q) {
                smem.work_full[at.count % 2].wait(at.count / 2 & 1);
                __syncwarp();
                if (!at.is_work(smem)) at.count = -1, loads = false;
            }
            at.advance(work);
            if (loads && at.tile >= 0) found = Kv(args, work.batch, work.place).find(at.tile);
            next = at;
        }
        smem.empty[stage].wait(parity);
        __syncwarp();
        if (!loads) return;
        if (is_q) arrive(smem.full[stage][0]), arrive(smem.full[stage][1]);
        else {
            Kv::load(smem.ring[stage], smem.full[stage][1], row);
            raw |= 1u << stage;
        }
    }
};
