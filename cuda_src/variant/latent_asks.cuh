#pragma once
// Where threads look up the rows of tiles, warpgroup 0 of attn_mla.cu asks for those of the next tile while Q K^T runs, in which it has
// nothing else to do: it copies rows, or asks TMA for records. Where the rows of a tile lie is found a tile earlier, and their numbers two tiles.
#include "ptx/cp_async_mbarrier.cuh"
#include "variant/latent_loads.cuh"

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

template <class Kv>
struct AskedFor {
    LoadPosition next;   // what is asked for next
    RowsAhead<Kv> rows;  // and where that lies

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
        if (is_q) Kv::Loads::arrive(smem.full[ring.stage]);  // which comes by itself
        else Kv::load(args, smem.ring[ring.stage], smem.full[ring.stage], rows.row);
        at.advance(work), next = at;
        if (at.count >= 0 && at.tile >= 0) rows.look_up(args, work, at, is_q);
        __syncwarp();
    }
    // Whether what is asked for next is a tile.
    __device__ bool comes() const { return next.tile >= 0 && next.of >= 0; }
};

// Threads copy rows, 16 bytes at a time. Products see copies by threads only behind a fence.
template <class Kv>
struct CopiedByWeigher {
    using Barrier = ptx::CopiesMbarrier;
    using Asks = AskedFor<Kv>;
    static constexpr u32 threads = 128, arrivals = threads, rest_arrivals = threads;
    struct Board {};

    __device__ static void init(Board&) {}
    __device__ static void fence_first() { ptx::fence_proxy_async(); }
    __device__ static void fence() { ptx::fence_proxy_async(); }
    __device__ static void arrive(Barrier (&full)[2]) { full[0].arrive(), full[1].arrive(); }
    template <class Smem>
    __device__ static void begin(const Args&, Smem&) {}
    template <class Smem>
    __device__ static void load(const Args&, Smem&, const Ring<Smem::stages>&) {}
    template <class Smem>
    __device__ static void work(Smem&, const Ring<Smem::stages>&, bool, bool) {}
};
