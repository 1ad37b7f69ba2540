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
    // All has begun to come.
    template <class Smem>
    __device__ static void load_rest(const Args&, Smem&, const Ring<Smem::stages>&) {}
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

// Which tile of a work comes next, or its Q, as registers hold it; and the same in parts, all lanes alike.
struct LoadPosition {
    i32 tile = -1, of = 0;
};
struct Position {
    i32 count, split, tile;  // works before, modulo 4, or -1 behind the last; a tile of -1 is Q

    __device__ Position(const LoadPosition& at) : count(ptx::from_lane(at.of, 0) >> 8), split(ptx::from_lane(at.of, 0) & 255), tile(ptx::from_lane(at.tile, 0)) {}
    __device__ operator LoadPosition() const { return {tile, count * 256 + split}; }
    template <class Smem>
    __device__ bool is_work(const Smem& smem) const { return ptx::from_lane(smem.work[count % 2].batch, 0) >= 0; }
    template <class Work>
    __device__ void advance(const Work& work) {
        if (count < 0) return;
        if (tile < 0) split = ptx::from_lane(work.split, 0);
        else if (++tile < ptx::from_lane(Span(work, split).end, 0)) return;
        else if (++split >= ptx::from_lane(work.split_end, 0)) {
            count = count + 1 & 3, tile = -1;
            return;
        }
        tile = ptx::from_lane(Span(work, split).tile, 0);
    }
};

// Where the rows of a tile lie, and what is known of those of the tile behind it. A lane has one of them, or some.
template <class Kv>
struct RowsAhead {
    typename Kv::Row row;
    typename Kv::Number number;

    // Of the tile that comes next; `is_first`: of a work. Here lanes part: nothing that they share follows, or the compiler no longer knows
    // that they agree.
    template <class Work>
    __device__ void look_up(const Args& args, const Work& work, const Position& at, bool is_first) {
        Position behind = at;
        behind.advance(work);
        const Kv source(args, ptx::from_lane(work.batch, 0), work.place);
        row = source.row(at.tile, is_first ? source.find(at.tile) : number);
        if (behind.tile >= 0) number = source.find(behind.tile);  // last: a load that was asked for before is waited for with this one
    }
};

// All that multiply by values copy rows, 16 bytes at a time: the first part of a tile when its stage is given back, the rest while the next
// tile is multiplied. Where the rows of a tile lie is found a tile earlier, and their numbers two tiles.
template <class Kv>
struct LoadedByAll {
    using Barrier = ptx::CopiesMbarrier;
    using Asks = NoneAskedFor;
    static constexpr u32 threads = 256, arrivals = threads, rest_arrivals = threads;
    struct Board {};
    LoadPosition next;   // what comes next, or has begun to come
    RowsAhead<Kv> rows;  // and where that lies

    __device__ static void init(Board&) {}
    // Products see copies by threads only behind a fence. Those of the first panels have one when they are said to be there; the others,
    // whose products follow those of the first, when they are waited for.
    __device__ static void fence_first() {}
    __device__ static void fence() { ptx::fence_proxy_async(); }
    template <class Smem>
    __device__ static void work(Smem&, const Ring<Smem::stages>&, bool, bool) {}
    template <class Smem>
    __device__ void begin(const Args& args, Smem& smem) {
#pragma unroll 1
        for (u32 i = 0; i < Smem::stages; ++i) {
            if (i > 0) finish<true>(args, smem, i - 1);
            start(args, smem, i);
        }
    }
    template <class Smem>
    __device__ void load(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) const {
        smem.empty[ring.stage].wait(ring.parity);
        __syncwarp();
        start(args, smem, ring.stage);
    }
    // The rest of what has begun to come to the stage that was given back last.
    template <class Smem>
    __device__ void load_rest(const Args& args, Smem& smem, const Ring<Smem::stages>& ring) {
        finish<false>(args, smem, ring.previous().stage);
    }
    template <class Smem>
    __device__ void start(const Args& args, Smem& smem, u32 stage) const {
        const Position at(next);
        if (at.count < 0) return;
        if (at.tile >= 0) Kv::template copy<0, Smem::first_panels>(args, smem.ring[stage], rows.row);
        else {  // Q, if there is a work
            smem.work_full[at.count % 2].wait(at.count / 2 & 1);
            __syncwarp();
            if (at.is_work(smem)) smem.full[stage][0].arrive(), smem.full[stage][1].arrive();
        }
    }
    // That the first panels are there, when they are. While products run they have been for long.
    template <class Smem>
    __device__ static void say_first(Smem& smem, u32 stage) {
        ptx::cp_async_wait<0>();
        ptx::fence_proxy_async();
        smem.full[stage][0].arrive();
    }
    template <bool at_once, class Smem>
    __device__ void finish(const Args& args, Smem& smem, u32 stage) {
        Position at(next);
        if (at.count >= 0) {
            const auto& work = smem.work[at.count % 2];
            const bool is_first = at.tile < 0;
            if (!is_first) {
                ptx::cp_async_commit();
                if (!at_once) say_first(smem, stage);
                Kv::template copy<Smem::first_panels, Smem::panels>(args, smem.ring[stage], rows.row);
                smem.full[stage][1].arrive_after_copies();
                if (at_once) say_first(smem, stage);
            } else if (!at.is_work(smem)) at.count = -1;
            at.advance(work);
            next = at;
            if (at.count >= 0 && at.tile >= 0) rows.look_up(args, work, at, is_first);
        }
        __syncwarp();
    }
};
