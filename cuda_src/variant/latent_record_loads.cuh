#pragma once
// Who loads the stages of attn_mla.cu where tiles come as records (variant/latent_loads.cuh): all that multiply by values, eight rows each
// warp. The warp looks its rows up, asks TMA for them when a stage is given back, and makes numbers of them while a product runs, one
// stage later, when it also asks L2 for the records that come next. So records have the time of Q K^T of a tile to come, and are numbers
// when P V of the next but one before them ends.
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
    static constexpr u32 threads = 256, warps = threads / 32, arrivals = warps;
    struct Board {  // of two positions by turns: the first thread writes the next one, all read it when a stage is given back
        i32 tile[2];
        unsigned char split[2];
        signed char count[2];  // works before, modulo 4; -1 behind the last
    };
    typename Kv::Row row;  // of what comes next, where that is a tile,
    i32 found;             // what was known of it before,
    i32 ahead = -1;        // and which it is: twice its number, and a bit of its work; below 0 where it is none
    u32 raw = 0;           // stages that hold records, in bits

    __device__ static void init(Board& board) { board.tile[0] = -1, board.split[0] = board.count[0] = 0; }
    // Those who wrote numbers have seen to it, in the own block.
    __device__ static void fence_first() { Kv::fence(); }
    __device__ static void fence() {}
    template <class Smem>
    __device__ void begin(const Args& args, Smem& smem) {
#pragma unroll 1
        for (u32 i = 0; i < Smem::stages; ++i) {
            if (i > 0) ptx::bar_sync(2, threads);
            look_up(args, smem);
            next(args, smem, i, i & 1);
        }
    }
    // A stage that was given back.
    template <class Smem>
    __device__ void load(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) {
        smem.empty[ring.stage].wait(ring.parity);
        __syncwarp();
        next(args, smem, ring.stage, ring.stage + ring.parity + 1 & 1);
    }
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
        const i32 next = ptx::from_lane(ahead, 0);
        if (next < 0) return;
        const auto& work = smem.work[next % 2];
        row = Kv(args, work.batch, work.place).row(next / 2, found);
        Kv::prefetch(row);
    }
    __device__ static void arrive(Barrier& barrier) {
        __syncwarp();
        if (ptx::lane_id() == 0) barrier.arrive();
    }
    // Asks for what comes to a stage next, if anything does.
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
                    arrive(smem.full[stage][0]), arrive(smem.full[stage][1]);
                    split = ptx::from_lane(work.split, 0), tile = ptx::from_lane(Span(work, split).tile, 0);
                }
            } else {
                Kv::load(smem.ring[stage], smem.full[stage][1], row);
                raw |= 1u << stage;
                if (tile + 1 < ptx::from_lane(Span(work, split).end, 0)) ++tile;
                else if (split + 1 < ptx::from_lane(work.split_end, 0)) ++split, tile = ptx::from_lane(Span(work, split).tile, 0);
                else count = count + 1 & 3, tile = -1;
            }
            ahead = count >= 0 && tile >= 0 ? tile * 2 + count % 2 : -1;
            if (ahead >= 0) found = Kv(args, work.batch, work.place).find(tile);
        }
        if (threadIdx.x == 128) board.tile[turn ^ 1] = tile, board.split[turn ^ 1] = split, board.count[turn ^ 1] = count;
        __syncwarp();
    }
};
