// Attention of some tens to some hundreds of rows over cached keys on Hopper: o = softmax(mask(score(q k^T))) v, with wgmma.
//
// Rows are the queries of all heads that share a key head, cfg::tile_q of them in a work, 64 for each of cfg::consumers warpgroups.
// Blocks are persistent: each takes an equal share of all key tiles, cut at the borders of splits, which it finds from the lengths on
// the device (variant/scheduler/stream_k.cuh). Warp 0 finds works and loads their key tiles, warp 1 their queries. A warpgroup sees all
// keys of a split, one tile's values multiplied while the softmax of the next one runs; its splits are folded from left to right.
//
//   barrier          arrives                          waits                    protects
//   work_full[i]     a lane of warp 0                 consumers, warp 1*       smem.work[i]
//   work_empty[i]    a lane of each of these warps    warp 0                   smem.work[i] and .border[i] until written again
//   q_full[s]        a lane of warp 1                 consumers                smem.q[s] until read; smem.border[i] of its work
//   q_empty[s]       a lane of each consumer warp     warp 1                   smem.q[s] until refilled
//   k_full[s], v_full[s], k_empty[s], v_empty[s]: the same for a tile of K and of V, which TMA brings (bytes)
//   * and warps 2 and 3 where they copy rows in place of TMA: their threads then arrive at k_full[s] and v_full[s] when their copies are there,
//     and consumers have a fence of proxies behind their waits
//   the option Order may have named barriers between the consumers
//
// A block with the first splits of a work folds them as it goes, and leaves what they give as one state if others have the rest. Those
// leave a state for each split, at that block's border (tile/cut_work.cuh). attn_decode_fold.cu folds them on: so the sums are the same
// wherever works are cut. Who changes lengths while blocks look at them gets results that are undefined, but lie in their memory. No vote
// of a warp looks at a number: rows do not see each other.

#include "config.cuh"  // rendered: cfg, Args, QkMma, PvMma, and the options
                       // Element, Rows, Mask, Score, Softmax, Order, Kv, Walk, Scheduler, Store, Launch
#include "ptx/cp_async.cuh"
#include "tile/cut_work.cuh"
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/range.cuh"
#include "tile/ring.cuh"
#include "tile/softmax.cuh"
#include "tile/strided_tensor.cuh"
#include "tile/tile.cuh"
#include "variant/interfaces.cuh"

using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using KTile = Kv::Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Kv::Tile<cfg::tile_kv, cfg::head_dim_v>;

constexpr i32 most_early = 8;  // sequences whose lengths a block reads while the launch before still runs; more were not timed here

// What has been found of a work's splits so far: the columns in shared memory, each thread's own, as registers are few.
using Columns = float[cfg::head_dim_v / 2];
struct Total {
    using Board = float4[blocks][128 * cfg::consumers];
    Board& o;
    MaxSum stats;

    __device__ float4& at(int i) const { return o[i][threadIdx.x - 128]; }
    __device__ static float4 four(const Columns& x, int i) { return make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]); }
    __device__ void put(const MaxSum& found, const Columns& x) {
        stats = found;
#pragma unroll
        for (int i = 0; i < blocks; ++i) at(i) = four(x, i);
    }
    // Makes of what was found over keys that follow what was found over all so far, and keeps it.
    __device__ void join(MaxSum& next, Columns& x, float scale_log2) {
        const Factors by = stats.factors(next, scale_log2);
        stats.fold(next, by), next = stats;
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            const float4 sum = at(i);
            x[4 * i] = by.fold(sum.x, x[4 * i], 0), x[4 * i + 1] = by.fold(sum.y, x[4 * i + 1], 0);
            x[4 * i + 2] = by.fold(sum.z, x[4 * i + 2], 1), x[4 * i + 3] = by.fold(sum.w, x[4 * i + 3], 1);
            at(i) = four(x, i);
        }
    }
};
struct Work {
    SplitRun run;
    TileRange tiles;  // of the work's rows
    i32 rows;
    Line line;
};
struct Smem {
    QTile q[cfg::q_stages];
    KTile k[cfg::stages];
    VTile v[cfg::stages];
    Total::Board total;
    ptx::Mbarrier q_full[cfg::q_stages], q_empty[cfg::q_stages];
    Kv::Loads::Barrier k_full[cfg::stages], v_full[cfg::stages];
    ptx::Mbarrier k_empty[cfg::stages], v_empty[cfg::stages];
    ptx::Mbarrier work_full[2], work_empty[2];
    Work work[2];
    i32 border[2];  // at which a work's states are left
    SeenLength seen[most_early];
    Kv::Board board;
};
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SoftmaxOption<Softmax, Score>;
template struct OrderOption<Order>;
template struct PanelsKvOption<Kv, KTile, VTile>;
template struct SharesOption<Scheduler>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), Launch::uses_pdl};

// Loads key tiles.
__device__ void load_keys(const Args& args, Smem& smem, Ring<cfg::stages>& kv, const Rows& rows, const SplitRun& run, TileRange tiles) {
    if (tiles.begin >= tiles.end) return;
    const Kv source(args, rows, run);
    i32 found = source.find(tiles.begin);
#pragma unroll 1
    for (i32 tile = tiles.begin; tile < tiles.end; ++tile, kv.advance()) {
        const auto at = Kv::at(smem.board, tile, source.page(tile, found));
        found = tile + 1 < tiles.end ? source.find(tile + 1) : -1;
        smem.k_empty[kv.stage].wait(kv.parity ^ 1);
        source.load_k(smem.k[kv.stage], smem.k_full[kv.stage], at);
        smem.v_empty[kv.stage].wait(kv.parity ^ 1);
        source.load_v(smem.v[kv.stage], smem.v_full[kv.stage], at);
    }
}

// The first warp. `early`: the launch before may still run; false where it has then changed what had been read.
__device__ bool produce(const Args& args, Smem& smem, bool early) {
    Scheduler scheduler(args, early ? smem.seen : nullptr);
    Left left{0, 0, 0, 0, 0, 0, scheduler.here, scheduler.end};
    Step works;
    Ring<cfg::stages> kv;
    while (true) {
        const auto [run, rows] = scheduler.next(args);
        const TileRange own = Walk::span(args, rows, run, min(run.q_begin + cfg::tile_q, rows.q_len));
        const TileRange tiles = run.splits.clip(own, run.split, run.split_end);
        if (early && works.count == 0) {
            Launch::wait();
            Launch::launch_dependents();
            if (!Scheduler::holds(args, smem.seen)) return false;
        }
        const u32 place = works.stage();
        smem.work_empty[place].wait(works.parity() ^ 1);
        __syncwarp();  // all lanes have seen the place free: one that comes late would wait for its next turn
        if (threadIdx.x == 0) {
            smem.work[place] = {run, own, min(cfg::tile_q, rows.q_len - run.q_begin), scheduler.line};
            smem.work_full[place].arrive();
        }
        if (run.is_last()) break;
        if (run.split == run.splits.begin && !run.is_whole())
            left = {run.batch, run.head, run.q_begin, rows.q_len - run.q_begin, run.split_end - run.split, run.splits.end - run.split, left.begin, left.end};
        if constexpr (!Kv::Loads::warps) load_keys(args, smem, kv, rows, run, tiles);
        __syncwarp();
        ++works.count;
    }
    if (threadIdx.x == 0) args.left[blockIdx.x] = left;
    return true;
}

// The second warp loads queries, each lane some rows: those of any number of heads.
__device__ void load_queries(const Args& args, Smem& smem) {
    constexpr i32 chunks = cfg::head_dim / 8;  // of a row, 16 bytes each
    Ring<cfg::q_stages> q;
    for (Step works;; ++works.count, q.advance()) {
        const u32 place = works.stage();
        smem.work_full[place].wait(works.parity());
        const SplitRun work = smem.work[place].run;
        const Line line = smem.work[place].line;
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.work_empty[place].arrive();
        if (work.is_last()) return;
        const Rows rows(args, work.batch);
        smem.q_empty[q.stage].wait(q.parity ^ 1);
        __syncwarp();
#pragma unroll 1
        for (i32 row = i32(threadIdx.x) % 32; row < cfg::tile_q; row += 32) {
            const bool inside = work.q_begin + row < rows.q_len;
            const i64 at = rows.offset({args.q.batch_bytes, args.q.row_bytes, args.q.head_bytes}, inside ? work.q_begin + row : 0, work.head);
            const u32 to = ptx::smem_address(&smem.q[q.stage]) + row * 128;
#pragma unroll
            for (i32 i = 0; i < chunks; ++i)
                ptx::cp_async(to + i / 8 * QTile::panel_bytes + (i % 8 ^ row % 8) * 16, args.q.data + at + i * 16, inside ? 16 : 0);
        }
        ptx::cp_async_commit();
        const bool begins = work.split == work.splits.begin;
        if (threadIdx.x % 32 == 0) smem.border[place] = begins ? blockIdx.x : line.owner(work.splits, work.at, work.splits.begin);
        ptx::cp_async_wait<0>();
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.q_full[q.stage].arrive();
    }
}

// The last two warps, where they copy rows.
__device__ void copy_keys(const Args& args, Smem& smem) {
    Ring<cfg::stages> kv;
    for (Step works;; ++works.count) {
        const u32 place = works.stage();
        smem.work_full[place].wait(works.parity());
        const SplitRun run = smem.work[place].run;
        const TileRange own = smem.work[place].tiles;
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.work_empty[place].arrive();
        if (run.is_last()) return;
        load_keys(args, smem, kv, Rows(args, run.batch), run, run.splits.clip(own, run.split, run.split_end));
    }
}

// Where loops are known to be the same in a warp, descriptors, which follow from the ring's stages, may stay in uniform registers.
__device__ i32 uniform(i32 x) { return ptx::uniform(x); }

struct Consumer {
    using Dots = float[QkMma::accumulators];
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    const SmemDescriptor<QTile> q_rows;
    const SmemDescriptor<KTile> k_columns;
    const SmemDescriptor<VTile> v_rows;
    const Order order;
    Ring<cfg::q_stages> q{};
    Ring<cfg::stages> kv{};  // the K tile at hand
    float o[PvMma::accumulators];
    u32 p[QkMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          q_rows(SmemDescriptor<QTile>::of_columns(smem.q).rows_from(index * 64)), k_columns(SmemDescriptor<KTile>::of_columns(smem.k)),
          v_rows(SmemDescriptor<VTile>::of_rows(smem.v)), order(index) {}

    // Said by each warp when it has read a stage, or a work.
    __device__ void release(ptx::Mbarrier& empty) const {
        if (lane % 32 == 0) empty.arrive();
    }
    __device__ void start_qk(Dots& s, const Ring<cfg::stages>& at) const {
        const SmemDescriptor<QTile> a = q_rows.stage(uniform(q.stage));
        const SmemDescriptor<KTile> b = k_columns.stage(at.stage);
        smem.k_full[at.stage].wait(at.parity);
        Kv::Loads::fence();
        order.take_turn();
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::head_dim / 16; ++i) QkMma::multiply(s, a.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_pv(const Ring<cfg::stages>& at) {
        const SmemDescriptor<VTile> b = v_rows.stage(at.stage);
        smem.v_full[at.stage].wait(at.parity);
        Kv::Loads::fence();
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_kv / 16; ++i) PvMma::multiply(o, p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }

    // This is what a warpgroup has for one work.
    struct Own {
        const Rows rows;
        const Mask mask;
        const Score score;
        const i32 row;  // this thread's upmost

        __device__ Own(const Args& args, const WorkTile& work, i32 row)
            : rows(args, work.batch), mask(args, rows, work), score(args, rows, work), row(row) {}
    };
    // Q K^T of a tile and, where it is `pending`, P V of the one before it are issued together; the softmax runs under the latter.
    template <bool pending>
    __device__ void step(const Own& own, Softmax& softmax, i32 tile, bool full, Dots& s) {
        const Ring<cfg::stages> at = kv, before = at.previous();
        start_qk(s, at);
        if constexpr (pending) start_pv(before);
        order.pass_turn();
        ptx::wgmma_wait<pending>();
        release(smem.k_empty[at.stage]);
        const i32 first = tile * cfg::tile_kv + lane % 4 * 2;
        const PlacedScore<Score> placed{own.score, own.row, first};
        const auto logits = [&] {
            placed.logits(s);
            if (!full) mask_fragment(own.mask, s, own.row, first);
        };
        softmax.next(s, placed, full, logits, [] {});
        if constexpr (pending) {
            ptx::wgmma_wait<0>();
            release(smem.v_empty[before.stage]);
        }
        kv.advance();
#pragma unroll
        for (int i = 0; i < QkMma::accumulators; i += 2) p[i / 2] = Element::pack(s[i], s[i + 1]);
        if constexpr (pending) softmax.rescale(o);
    }
    __device__ void attend_split(const Own& own, Softmax& softmax, TileRange tiles) {
#pragma unroll
        for (float& x : o) x = 0.f;
        if (tiles.begin >= tiles.end) return;
        Dots s;
        i32 tile = tiles.begin;
        step<false>(own, softmax, tile, tiles.is_full(tile), s);
#pragma unroll 1
        while (++tile < tiles.end) step<true>(own, softmax, tile, tiles.is_full(tile), s);
        start_pv(kv.previous());
        ptx::wgmma_wait<0>();
        release(smem.v_empty[kv.previous().stage]);
    }

    __device__ i32 strip() const { return index * 4 + lane / 32; }  // this warp's
    __device__ void leave(i32 border, i32 place, const MaxSum& found) const {
        float4* const to = state_at(args, border, min(place, args.slots - 1), strip());
        const u32 own = lane % 32;
#pragma unroll
        for (int i = 0; i < blocks; ++i) to[i * 32 + own] = Total::four(o, i);
        if (own % 4 == 0) to[blocks * 32 + own / 4] = found.max_sum();
    }

    __device__ void attend(const Work& work, const i32& border) {
        const SplitRun& run = work.run;
        const i32 begin = run.splits.begin;
        const bool has_rows = strip() * 16 < work.rows;
        const Own own(args, run, run.q_begin + strip() * 16 + lane % 32 / 4);
        MaxSum found;
        Total total{smem.total};
        smem.q_full[q.stage].wait(q.parity);
        i32 split = uniform(run.split);
        const i32 split_end = uniform(run.split_end);
#pragma unroll 1
        do {  // one at least: else what the work before left in registers would be kept
            Softmax softmax(args, own.rows, run, own.score.scale_log2);
            const TileRange tiles = run.splits.clip(work.tiles, split, split + 1);
            attend_split(own, softmax, {uniform(tiles.begin), uniform(tiles.full_begin), uniform(tiles.full_end), uniform(tiles.end)});
#pragma unroll
            for (int r = 0; r < 2; ++r) found.max[r] = softmax.max[r], found.sum[r] = quad_sum(softmax.sum[r]);
            if (run.split > begin) {
                if (has_rows) leave(border, run.splits.end - split, found);
            } else if (split == begin) total.put(found, o);
            else total.join(found, o, own.score.scale_log2);
        } while (++split < split_end);
        __syncwarp();
        release(smem.q_empty[q.stage]);
        q.advance();
        if (!has_rows) return;
        if (run.is_whole()) store_strip(Store(args, own.rows, run), args, own.rows, run, own.row, found, o, own.score.scale_log2);
        else if (run.split == begin) leave(border, 0, found);
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();  // on a path of its own: where ways meet again, all have the registers of the fewest
    Consumer consumer(args, smem);
    for (Step works;; ++works.count) {
        const u32 place = works.stage();
        smem.work_full[place].wait(works.parity());
        if (uniform(smem.work[place].run.batch) < 0) return;
        consumer.attend(smem.work[place], smem.border[place]);
        __syncwarp();
        consumer.release(smem.work_empty[place]);
    }
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_decode_wide(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        constexpr u32 readers = 4 * cfg::consumers, arrivals = Kv::Loads::arrivals;
        Kv::Loads::prefetch(args);
        for (int i = 0; i < cfg::q_stages; ++i) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        for (int i = 0; i < 2; ++i) smem.work_full[i].init(1), smem.work_empty[i].init(readers + 1 + Kv::Loads::warps);
        for (int i = 0; i < cfg::stages; ++i) {
            smem.k_full[i].init(arrivals), smem.k_empty[i].init(readers);
            smem.v_full[i].init(arrivals), smem.v_empty[i].init(readers);
        }
        smem.board.init();
        ptx::fence_mbarrier_init();
    }
    if (threadIdx.x < 32) Rows::prefetch(args);
    __syncthreads();
    bool early = Launch::uses_pdl && threadIdx.x < 32 && args.batches <= most_early;
    if (!early) {
        Launch::wait();
        Launch::launch_dependents();
    }
    if (threadIdx.x >= 128) return consume(args, smem);
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x >= 64) {
        if constexpr (Kv::Loads::warps) copy_keys(args, smem);
        return;
    }
    if (threadIdx.x >= 32) return load_queries(args, smem);
#pragma unroll 1
    while (!produce(args, smem, early)) early = false;
}
