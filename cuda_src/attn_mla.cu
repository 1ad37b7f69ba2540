// Attention over latent caches on Hopper, whose values are the first columns of their keys (MLA): o = softmax(mask(score(q k^T))) k[:, :512].
//
// Rows are the queries of all heads, 64 of them in a block; of more, pairs of blocks with numbers on end compute 128 at the same time,
// so that keys come from memory once; from L2, too, where a pair is a cluster, of which each block brings half of a tile to both
// (variant/members/). Each block, or pair, takes an equal share of all key tiles, cut at the borders of splits, which it finds from the
// lengths on the device (variant/scheduler/stream_k.cuh).
//
// Warpgroup 0 computes S = Q K^T and weights. All but the last 80 columns of Q lie in its registers, so that a product reads shared
// memory for K alone. Warpgroups 1 and 2 compute the left and the right 256 columns of O += P V; a warp of the former loads tiles of keys,
// or all of both copy rows of keys, in part while P V runs (variant/latent_loads.cuh).
// P of a tile goes where its last 64 columns were, which V does not need. P V of a tile is issued when Q K^T of the next one is nearly
// done, and so runs under that one's softmax. Q comes through the ring as tiles do: warpgroup 0 copies it to the stage that it is given.
//
//   barrier           arrives                        waits                   protects
//   full[s][part]     TMA (bytes, of both blocks of  warpgroup 0             a stage; its last panels by themselves
//                     a cluster) or who copied,
//                     who gives a stage for Q
//   p_full[s]         warps of warpgroup 0           warpgroups 1, 2         P, told[s] and factor[s]; at a split's end factor[s + 1], too
//   go[s]             warps of warpgroup 0           warpgroups 1, 2         nothing: says when P V may take the tensor cores
//   empty[s]          warps of 1 and 2, of both      the loader, warpgroup 0 a stage until refilled, factor[s] until written again
//                     blocks of a cluster
//                     Where threads copy rows (variant/latent_loads.cuh), or ask for records (variant/latent_record_loads.cuh), all of 1 and 2
//                     are the loader. Threads that copy arrive at full[s][part]. Of records part 1 tells warpgroups 1 and 2 that they came, and
//                     warps arrive at part 0 when they have made numbers of them; in a cluster each block makes half of a tile's for both, and
//                     part 0 awaits the bytes of the other's, too (variant/kv/latent_shared_records.cuh)
//   work_full[i]      a lane of warp 0; in a cluster the loader, warpgroup 0 work[i]
//                     bytes, from the first block's
//   work_empty[i]     warps of 1 and 2, of both      warp 0, of the first    work[i] until the next but one is found
//                     blocks of a cluster            block
//   cluster           all threads of both blocks     they                    barriers until made; at the end a block until nobody reaches it
//   named barrier 1   warpgroup 0                    warpgroup 0             the last columns of K, read by all of it, before P goes there; Q
//   named barrier 2   warpgroups 1, 2                warpgroups 1, 2         a stage, read by both, before what is parked comes there; rows that are cleared
//
// Warp 0 finds the next work before it computes one, when neither Q nor S is in registers. The loader may need a work that is not found
// only behind the last tile of the one before the one in front of it: it loads there when the result is stored, and work_empty is said.
//
// The first splits of a work are folded as they go: O so far lies in memory, args.parked, each thread's own numbers, as no registers are
// left. Of works that are cut a block leaves what blocks of attn_decode_wide.cu leave, for the same launch to fold. But of two blocks that
// have parts of a work the one with more splits has the first ones, be it the second block (Scheduler::cut). No vote of a warp changes a
// result: rows do not see each other.

#include "config.cuh"  // rendered: cfg, Args, QkMma, QkLastMma, PvMma, and the options
                       // Element, Rows, Mask, Score, Softmax, QColumns, Kv, Walk, Scheduler, Members, Store, Launch
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/elect.cuh"
#include "ptx/tma.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/load_shared.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/cut_work.cuh"
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/range.cuh"
#include "tile/ring.cuh"
#include "tile/softmax.cuh"
#include "tile/strided_tensor.cuh"
#include "tile/tile.cuh"
#include "variant/interfaces.cuh"

constexpr int tile_rows = 64, stages = 3;
constexpr int panels = cfg::head_dim / 64, v_panels = cfg::head_dim_v / 64, first_panels = Kv::Loads::first_panels;
constexpr int q_steps = 4 * v_panels - 1;  // of sixteen columns, in registers: with another one ptxas spills and serialises products
constexpr i32 most_early = 8;              // sequences whose lengths a block reads while the launch before still runs
using Stage = Kv::Tile<cfg::tile_kv, cfg::head_dim>;
using QPart = Tile<tile_rows, 64>;
static_assert(cfg::head_dim == 576 && cfg::head_dim_v == 512 && cfg::tile_kv == 64 && cfg::tile_q == tile_rows * cfg::members);
static_assert(sizeof(Stage) == panels * sizeof(QPart), "Q comes to a stage");

struct Work {
    i32 batch, q_begin;  // -1: there is none
    Walk::Place place;                    // keys, and the tiles of the block's rows
    short begin;                          // of the work's splits
    unsigned char split, split_end, end;  // the block's splits, and the work's end
    unsigned char border;                 // at which states are left
    unsigned char rows, shift;            // rows that exist; a split has 1 << shift key tiles
};
// What warpgroups 1 and 2 are told of a stage, in bits.
namespace what {
constexpr u32 is_end = 2;               // no work is left: where Q would come, of which nothing is told
constexpr u32 begins = 4, ends = 8;     // a split
constexpr u32 folds = 16;               // ... with what lies in args.parked
constexpr u32 parks = 32, leaves = 64;  // ... whose state goes there, or to a border; else the result is stored
constexpr u32 releases = 128;           // the work
constexpr int work = 8, place = 16;     // bits of numbers: of the work, of the place of a state,
constexpr int before = 24;              // and of rows before the first key
}  // namespace what
struct Smem {
    static constexpr int stages = ::stages, panels = ::panels, first_panels = ::first_panels;
    Stage ring[stages];
    QPart q_last;                   // the last 64 columns
    NarrowTile<tile_rows> q_slice;  // the sixteen before them
    float factor[stages][tile_rows];
    Kv::Loads::Barrier full[stages][2];
    ptx::Mbarrier p_full[stages], go[stages], empty[stages];
    ptx::Mbarrier work_full[2], work_empty[2];
    u32 told[stages];
    Work work[2];
    Kv::Loads::Board loader;
};
using SeenLengths = SeenLength[most_early];
static_assert(sizeof(SeenLengths) <= sizeof(Smem::factor) && sizeof(Smem) <= 232448);
static_assert(sizeof(Kv::Contract<Kv, Stage>));
static_assert(cfg::weigher_registers + 2 * cfg::summer_registers <= 3 * 168, "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SoftmaxOption<Softmax, Score>;
template struct QColumnsOption<QColumns>;
template struct WorkWalkOption<Walk>;
template struct SharesOption<Scheduler>;
template struct MembersOption<Members>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 384, Launch::uses_pdl};

__device__ inline i32 uniform(i32 x) { return ptx::from_lane(x, 0); }
__device__ inline i32 member() { return blockIdx.x % cfg::members; }
__device__ inline i32 share() { return blockIdx.x / cfg::members; }
__device__ inline WorkTile tile_of(const Work& work) { return {work.batch, 0, work.q_begin, 0}; }
// Where a warp of a warpgroup keeps what it has found of a work's splits so far; it lies as a state does.
__device__ inline float4* parked_at(const Args& args, u32 warp) {
    return reinterpret_cast<float4*>(args.parked) + (i64(blockIdx.x) * 4 + warp) * (blocks * 32 + 8);
}

// The next work in which the block has rows, by the first warp; of a cluster by that of its first block, for all: lengths may change, and blocks
// that computed other works would wait for each other for ever.
__device__ void find(const Args& args, Smem& smem, Scheduler& scheduler, u32 count) {
    using Byte = unsigned char;
    const u32 place = count % 2;
    while (true) {
        const auto [run, rows] = scheduler.next(args);
        const i32 q_begin = run.q_begin + member() * tile_rows, left = rows.q_len - q_begin;
        Work work{-1};
        Cut cut{};
        if (!run.is_last()) {
            if (!Members::together && left <= 0) continue;
            const WorkTile own{run.batch, run.head, q_begin, run.split};
            const WorkTile& all = Members::together ? run : own;  // whose tiles the block visits
            constexpr i32 all_rows = Members::together ? cfg::tile_q : tile_rows;
            cut = scheduler.cut(run, Walk::span(args, rows, all, all.q_begin + min(rows.q_len - all.q_begin, all_rows)), share());
            work = {run.batch, q_begin, Walk::Place(args, rows, own, cut.tiles), short(cut.begin), Byte(cut.split), Byte(cut.split_end), Byte(cut.end), Byte(cut.border),
                    Byte(Members::together ? max(0, min(left, tile_rows)) : min(left, tile_rows)), Byte(cut.shift)};
        }
        smem.work_empty[place].wait((count / 2 & 1) ^ 1);
        __syncwarp();
        if (threadIdx.x == 0) {
            smem.work[place] = work;
            smem.work_full[place].arrive();
            Left& to = args.left[share()];
            if constexpr (Members::together)
                for (i32 other = 1; other < cfg::members; ++other) {
                    Work theirs = work;
                    theirs.q_begin += other * tile_rows, theirs.rows = Byte(max(0, min(left - other * tile_rows, tile_rows)));
                    Members::send(smem.work[place], other, smem.work_full[place], theirs);
                }
            if (!run.is_last() && member() == 0 && run.split == run.splits.begin && !run.is_whole())
                to.batch = run.batch, to.head = run.head, to.q_begin = q_begin, to.rows = left, to.owned = cut.owned, to.splits = cut.splits;
        }
        break;
    }
    __syncwarp();
}
// A work comes from the cluster's first block.
__device__ void expect_work(Smem& smem, u32 count) {
    if (threadIdx.x == 0) smem.work_full[count % 2].arrive_expect(sizeof(Work));
    __syncwarp();
}
// The block's share and its first work. `early`: the launch before may still run.
__device__ void begin(const Args& args, Smem& smem, bool early) {
    if (!Members::finds()) return expect_work(smem, 0);
    SeenLengths& seen = reinterpret_cast<SeenLengths&>(smem.factor);
    while (true) {
        Scheduler scheduler(args, early ? seen : nullptr);
        if (early) {
            early = false;
            Launch::wait();
            Launch::launch_dependents();
            if (!Scheduler::holds(args, seen)) continue;
        }
        if (threadIdx.x == 0 && member() == 0) {
            args.left[share()] = {0, 0, 0, 0, 0, 0, scheduler.here, scheduler.end};
            if (share() + 1 == i32(gridDim.x) / cfg::members) args.left[share() + 1] = {0, 0, 0, 0, 0, 0, scheduler.end, scheduler.end};
        }
        find(args, smem, scheduler, 0);
        if (threadIdx.x == 0) reinterpret_cast<Scheduler*>(args.shares)[blockIdx.x] = scheduler;
        __syncwarp();
        return;
    }
}
__device__ void find_next(const Args& args, Smem& smem, u32 count) {
    if (!Members::finds()) return expect_work(smem, count);
    Scheduler* const kept = reinterpret_cast<Scheduler*>(args.shares) + blockIdx.x;
    Scheduler scheduler = *kept;
    __syncwarp();
    find(args, smem, scheduler, count);
    if (threadIdx.x == 0) *kept = scheduler;
    __syncwarp();
}

struct Weigher {  // warpgroup 0
    const Args& args;
    Smem& smem;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 q[q_steps][4];
    float s[QkMma::accumulators];
    float so_far;  // found of the work's splits: a lane has one of its quad's four numbers, as registers are few
    Ring<stages> ring;

    __device__ Weigher(const Args& args, Smem& smem) : args(args), smem(smem) {}

    // Where the lane's chunk of a 16 x 16 block of a swizzled panel is, from its row on.
    __device__ static u32 swizzled(u32 lane, u32 chunk) { return ((chunk + lane / 16) ^ lane % 8) * 16; }
    __device__ void say(ptx::Mbarrier& barrier) const {
        if (lane == 0) barrier.arrive();
    }
    __device__ void tell(u32 bits) const {
        if (threadIdx.x == 0) smem.told[ring.stage] = bits;
    }

    __device__ void copy_q(const Work& work, u32 to) const {
        const Rows rows(args, work.batch);
        const u32 chunk = lane % 8, last = ptx::smem_address(&smem.q_last), slice = ptx::smem_address(&smem.q_slice);
#pragma unroll 1
        for (u32 row = threadIdx.x / 8; row < tile_rows; row += 16) {
            const bool inside = row < work.rows;
            const QColumns q(args, rows, work.q_begin + (inside ? row : 0));
            const unsigned char* const from = q.first() + chunk * 16;
            const u32 place = row * 128 + (chunk ^ row % 8) * 16, bytes = inside ? 16 : 0;
#pragma unroll
            for (int panel = 0; panel < v_panels; ++panel) ptx::cp_async(to + panel * QPart::bytes + place, from + panel * 128, bytes);
            ptx::cp_async(last + place, q.rest() + chunk * 16, bytes);
            if (chunk >= 6) ptx::cp_async(slice + NarrowTile<tile_rows>::offset(row, chunk % 2), from + (v_panels - 1) * 128, bytes);
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
    }
    __device__ void take_q(const Work& work) {
        const u32 to = ptx::smem_address(&smem.ring[ring.stage]);
        smem.full[ring.stage][0].wait(ring.parity), smem.full[ring.stage][1].wait(ring.parity);
        copy_q(work, to);
        ptx::fence_proxy_async();
        ptx::bar_sync(1, 128);
        const u32 base = to + (warp * 16 + lane % 16) * 128;
#pragma unroll
        for (int i = 0; i < q_steps; ++i) ptx::ldmatrix(q[i], base + i / 4 * QPart::bytes + swizzled(lane, i % 4 * 2));
        ptx::fence_proxy_async();
        tell(0);
        __syncwarp();
        say(smem.p_full[ring.stage]), say(smem.go[ring.stage]);
        ring.advance();
    }

    // S = Q K^T of the tile at hand. `look` is called when all of it is issued, `begun` when most of it is done.
    template <class Look, class Begun>
    __device__ void multiply(const Look& look, const Begun& begun) {
        const auto k = SmemDescriptor<Stage>::of_columns(Members::address(smem.ring)).stage(ring.stage);
        const auto last = SmemDescriptor<QPart>::of_columns(Members::address(&smem.q_last));
        smem.full[ring.stage][0].wait(ring.parity);
        Kv::Loads::fence_first();
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4 * panels; ++i) {
            if (i == 4 * first_panels) {
                smem.full[ring.stage][1].wait(ring.parity);
                Kv::Loads::fence();
                ptx::wgmma_fence();
            }
            if (i < q_steps) QkMma::multiply(s, q[i], k.columns(i), i > 0);
            else if (i < 4 * v_panels) QkLastMma::multiply(s, smem.q_slice.columns(Members::address(&smem.q_slice)), k.columns(i), true);
            else QkLastMma::multiply(s, last.columns(i - 4 * v_panels), k.columns(i), true);
            if (i + 1 == 4 * cfg::go_after && cfg::go_after < panels) ptx::wgmma_commit();
        }
        ptx::wgmma_commit();
        look();
        ptx::wgmma_wait<(cfg::go_after < panels)>();
        begun();
        ptx::wgmma_wait<0>();
    }

    // The upmost row of this thread, in the sequence.
    __device__ i32 row_of(const Work& work) const { return work.q_begin + warp * 16 + lane / 4; }
    __device__ void weigh_tile(const Work& work, Softmax& softmax, i32 tile, const Walk::Kept& kept, bool full) {
        const Rows rows(args, work.batch);
        const Score score(args, rows, tile_of(work));
        const PlacedScore<Score> placed{score, row_of(work), i32(tile * cfg::tile_kv + lane % 4 * 2)};
        const auto logits = [&] {
            placed.logits(s);
            if (!full) kept.apply(args, rows, tile_of(work), work.place, s, placed.row, placed.first);
        };
        softmax.next(s, placed, full, logits, [] {});
        const u32 lane = ptx::lane_id(), row = warp * 16 + lane % 16;  // anew: nothing of it is kept around the loop
        const u32 to = ptx::smem_address(&smem.ring[ring.stage]) + Stage::row_offset(row) + v_panels * Stage::panel_bytes;
        ptx::bar_sync(1, 128);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = Element::pack(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
            ptx::stmatrix(to + swizzled(lane, 2 * j), words);
        }
    }
    __device__ void put_factors(u32 stage, float upper, float lower) const {
        if (lane % 4 == 0) smem.factor[stage][warp * 16 + lane / 4] = upper, smem.factor[stage][warp * 16 + lane / 4 + 8] = lower;
    }

    __device__ void attend(const Work& work, u32 count) {
        take_q(work);
        bool is_first = true, more = true;
#pragma unroll 1
        for (i32 split = work.split; more; ++split) {
            more = split + 1 < work.split_end;  // asked before the last tile is told of: then the work may be gone
            const Score score(args, Rows(args, work.batch), tile_of(work));
            Softmax softmax(args, Rows(args, work.batch), tile_of(work), score.scale_log2);
            Span span(work, split);
            u32 told = what::begins;
#pragma unroll 1
            for (; span.tile < span.end; ++span.tile) {
                const Walk::Kept kept(args, work, span.tile);
                const bool is_last = span.tile + 1 == span.end;
                bool full = false;
                const auto look = [&] {
                    const i32 before = work.place.first_to_clear() - span.tile * cfg::tile_kv;
                    full = work.place.is_full(span.tile);
                    if (before > 0) told |= min(before, cfg::tile_kv) << what::before;
                };
                multiply(look, [&] {
                    if (!is_first) say(smem.go[ring.previous().stage]);
                });
                weigh_tile(work, softmax, span.tile, kept, full);
                if (!(told & what::begins)) put_factors(ring.stage, softmax.shrink[0], softmax.shrink[1]);
                if (is_last) told |= end_split(work, softmax, split) | (count % 2) << what::work;
                tell(told);
                ptx::fence_proxy_async();
                __syncwarp();
                say(smem.p_full[ring.stage]);
                if (is_last && !more) say(smem.go[ring.stage]);
                is_first = false, told = 0;
                ring.advance();
            }
        }
    }

    // What becomes of a split's state; says so in bits. By what O, or O and what is parked, are multiplied goes where the factors of the
    // next stage would be, as that is Q or begins a split.
    __device__ u32 end_split(const Work& work, const Softmax& softmax, i32 split) {
        Ring<stages> next = ring;
        next.advance();
        smem.empty[next.stage].wait(next.parity ^ 1);
        __syncwarp();
        MaxSum found;
#pragma unroll
        for (int r = 0; r < 2; ++r) found.max[r] = softmax.max[r], found.sum[r] = quad_sum(softmax.sum[r]);
        const bool releases = split + 1 == work.split_end, has_rows = warp * 16 < work.rows;
        u32 told = what::ends | (releases ? what::releases : 0);
        float4* to = nullptr;
        if (work.split > work.begin) {
            told |= what::leaves | (work.end - split) << what::place;
            to = stats_at(work, work.end - split);
        } else {
            if (split > work.begin) {
                MaxSum total = found_so_far();
                const Factors by = total.factors(found, softmax.scale_log2);
                total.fold(found, by), found = total;
                put_factors(next.stage, code(by, 0), code(by, 1));
                told |= what::folds;
            }
            if (!releases) told |= what::parks, keep(found);
            else if (work.split_end < work.end) told |= what::leaves, to = stats_at(work, 0);
            else {
                finish(work, found, softmax.scale_log2, told & what::folds, next.stage);
            }
        }
        if (to != nullptr && has_rows && lane % 4 == 0) *to = found.max_sum();
        return told;
    }
    __device__ void keep(const MaxSum& found) {
        const float4 all = found.max_sum();
        so_far = lane % 2 ? lane % 4 == 1 ? all.y : all.w : lane % 4 ? all.z
                                                                     : all.x;
    }
    __device__ MaxSum found_so_far() const {
        const u32 first = lane & ~3u;
        const auto of = [&](u32 i) { return __shfl_sync(0xffffffffu, so_far, first + i); };
        MaxSum found;
        found.set(make_float4(of(0), of(1), of(2), of(3)));
        return found;
    }
    __device__ float4* stats_at(const Work& work, i32 place) const {
        return state_at(args, work.border, place, member() * 4 + warp) + blocks * 32 + lane / 4;
    }
    // One of the two factors is 1: the other one, below 0 where it is that of what is parked.
    __device__ static float code(const Factors& by, int r) { return by.here[r] == 1.f ? by.there[r] : -by.here[r]; }
    // The whole of the rows: their logarithms, and what makes sums to means; beside factors these go to memory.
    __device__ void finish(const Work& work, const MaxSum& found, float scale_log2, bool folds, u32 stage) const {
        const Rows rows(args, work.batch);
        Softmax whole(args, rows, tile_of(work), scale_log2);
        const Store store(args, rows, tile_of(work));
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i32 row = row_of(work) + 8 * r;
            const bool inside = row < rows.q_len;
            whole.max[r] = found.max[r], whole.sum[r] = lane % 4 ? 0.f : found.sum[r];
            LogSum<float> sum = whole.row_sum(r);
            whole.finish(inside ? row : 0, sum);
            inverse[r] = sum.inverse();
            if (lane % 4 == 0 && inside) store.lse(row, __fmaf_rn(__log2f(sum.total), float(ln_2), sum.reference));
        }
        if (!folds) put_factors(stage, inverse[0], inverse[1]);
        else if (lane % 4 == 0) parked_at(args, warp)[blocks * 32 + lane / 4] = make_float4(inverse[0], inverse[1], 0.f, 0.f);
    }
};

__device__ void weigh(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::weigher_registers>();
    Weigher weigher(args, smem);
    for (u32 count = 0;; ++count) {
        const Work& work = smem.work[count % 2];
        smem.work_full[count % 2].wait(count / 2 & 1);
        if (uniform(work.batch) < 0) break;
        if (ptx::uniform(threadIdx.x / 32) == 0) find_next(args, smem, count + 1);
        weigher.attend(work, count);
    }
    smem.empty[weigher.ring.stage].wait(weigher.ring.parity ^ 1);
    weigher.tell(what::is_end);
    __syncwarp();
    weigher.say(smem.p_full[weigher.ring.stage]);
}

struct Summer {  // warpgroups 1 and 2
    const Args& args;
    Smem& smem;
    Kv::Loads loads;
    float o[PvMma::accumulators];
    Ring<stages> ring;

    __device__ Summer(const Args& args, Smem& smem) : args(args), smem(smem) {}

    // Made anew where they are asked for: nothing of what follows from them is kept in registers around the loop.
    __device__ static u32 half() { return ptx::uniform(threadIdx.x / 128) - 1; }
    __device__ static u32 strip() { return ptx::uniform(threadIdx.x / 32) % 4; }          // of the block's
    __device__ static u32 strip_of_work() { return uniform(member()) * 4 + strip(); }
    __device__ static u32 thread() { return ptx::uniform(threadIdx.x / 32) * 32 - 128 + ptx::lane_id(); }  // of both warpgroups
    __device__ static u32 own() { return strip() * 16 + ptx::lane_id() / 4; }  // the upper one of this thread's rows
    __device__ static void say(ptx::Mbarrier& barrier) {
        __syncwarp();
        if (ptx::lane_id() == 0) barrier.arrive();
    }
    __device__ void give_back() const {
        __syncwarp();
        Members::give_back(smem.empty[ring.stage]);
    }

    // O = P V, or O += P V. The rest of what comes next is loaded meanwhile, where all load.
    __device__ void multiply(bool add) {
        const u32 first = Members::address(smem.ring);
        const auto tile = SmemDescriptor<Stage>::of_columns(first).stage(ring.stage);
        const auto v = SmemDescriptor<Stage>{SmemDescriptor<Stage>::of_rows(first).stage(ring.stage).low + half() * (v_panels / 2 * Stage::panel_bytes / 16)};
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < cfg::tile_kv / 16; ++k) PvMma::multiply(o, tile.columns(4 * v_panels + k), v.rows(k), add || k > 0);
        ptx::wgmma_commit();
        loads.load_rest(args, smem, ring), loads.work(args, smem, ring, 2);
        ptx::wgmma_wait<0>();
    }
    __device__ void rescale(float a, float b) {
#pragma unroll
        for (int i = 0; i < PvMma::accumulators; ++i) o[i] *= i % 4 < 2 ? a : b;
    }
    // The first rows of V, of keys that do not count: what is there may be NaN, of which a weight of 0 makes NaN. Those behind the last key
    // arrive as zeros.
    __device__ void clear(u32 rows) const {
#pragma unroll 1
        for (u32 i = thread(); i < rows * v_panels * 8; i += 256) {
            unsigned char* const to = reinterpret_cast<unsigned char*>(&smem.ring[ring.stage]) + Stage::row_offset(i / (v_panels * 8));
            *reinterpret_cast<uint4*>(to + i / 8 % v_panels * Stage::panel_bytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
        }
        ptx::fence_proxy_async();
        ptx::bar_sync(2, 256);
    }
    __device__ void add_tile(u32 told) {
        if (!(told & what::begins)) {
            const float *const factor = &smem.factor[ring.stage][own()], a = factor[0], b = factor[8];
            if (__any_sync(0xffffffffu, a != 1.f || b != 1.f)) rescale(a, b);
        }
        if (told >> what::before) clear(told >> what::before);
        smem.go[ring.stage].wait(ring.parity);
        multiply(!(told & what::begins));
    }
    __device__ float4* place(float4* state) const { return state + half() * (blocks / 2) * 32 + ptx::lane_id(); }
    // By such a code of each row (Weigher::code), of what is parked and of O. These are the products and sums of Factors::fold. What is
    // parked comes by way of the stage, when nobody reads it any more, each thread's own numbers where it alone looks. What they give is
    // parked in its place if the work goes on.
    __device__ void fold(float a, float b, bool parks) {
        constexpr int each = 4, ahead = 4, groups = blocks / 2 / each;  // float4 of a group of copies; groups on their way
        const bool upper = __float_as_uint(a) >> 31, lower = __float_as_uint(b) >> 31;
        float4* const from = place(parked_at(args, strip()));
        constexpr u32 step = 256 * sizeof(float4);  // from a thread's number to its next
        static_assert(ahead * each * step <= sizeof(Stage));
        const u32 to = ptx::smem_address(&smem.ring[ring.stage]) + thread() * sizeof(float4);
        const auto copy = [&](int group) {
#pragma unroll
            for (int i = 0; i < each; ++i) ptx::cp_async(to + (group % ahead * each + i) * step, from + (group * each + i) * 32);
            ptx::cp_async_commit();
        };
#pragma unroll
        for (int group = 0; group < ahead; ++group) copy(group);
        if (__any_sync(0xffffffffu, !upper || !lower)) rescale(upper ? 1.f : a, lower ? 1.f : b);
        a = upper ? -a : 1.f, b = lower ? -b : 1.f;
#pragma unroll
        for (int group = 0; group < groups; ++group) {
            ptx::cp_async_wait<ahead - 1>();
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const float4 sum = ptx::load_shared_float4(to + (group % ahead * each + i) * step);
                float* const x = o + 4 * (group * each + i);
                x[0] = __fmaf_rn(sum.x, a, x[0]), x[1] = __fmaf_rn(sum.y, a, x[1]);
                x[2] = __fmaf_rn(sum.z, b, x[2]), x[3] = __fmaf_rn(sum.w, b, x[3]);
                if (parks) from[(group * each + i) * 32] = make_float4(x[0], x[1], x[2], x[3]);
            }
            if (group + ahead < groups) copy(group + ahead);
            else ptx::cp_async_commit();
        }
        ptx::fence_proxy_async();  // TMA writes there next
    }
    __device__ void keep(float4* state) const {
        float4* const to = place(state);
#pragma unroll
        for (int i = 0; i < blocks / 2; ++i) to[i * 32] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    // By what the sums of the thread's two rows are multiplied lies `step` numbers apart.
    __device__ void store(const Work& work, const float* inverse, int step) const {
        const Rows rows(args, work.batch);
        const Store store(args, rows, tile_of(work));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i32 row = work.q_begin + own() + 8 * r;
            const bool inside = row < rows.q_len;
            store_row(store.o(inside ? row : 0) + half() * (cfg::head_dim_v / 2), inside, o, r, inverse[r * step]);
        }
    }
    // What becomes of a split's state. The stage is given back before it is stored, but behind the work's last split: until then nobody
    // overwrites the work, nor what is parked.
    __device__ void end_split(u32 told) {
        const Work& work = smem.work[told >> what::work & 1];
        const bool has_rows = strip() * 16 < work.rows;
        const float* const factor = &smem.factor[ring.stage + 1 == stages ? 0 : ring.stage + 1][own()];
        if (told & what::folds) {
            ptx::bar_sync(2, 256);
            if (has_rows) fold(factor[0], factor[8], told & what::parks);
        }
        if (!(told & what::releases)) {
            give_back();
            go_on();
        }
        if (has_rows) {
            if (told & what::parks) {
                if (!(told & what::folds)) keep(parked_at(args, strip()));
            } else if (told & what::leaves) keep(state_at(args, work.border, told >> what::place & 255, strip_of_work()));
            else if (told & what::folds) store(work, reinterpret_cast<const float*>(parked_at(args, strip()) + blocks * 32 + ptx::lane_id() / 4), 1);
            else store(work, factor, 8);
        }
        if (told & what::releases) {
            give_back(), __syncwarp(), Members::release(smem.work_empty[told >> what::work & 1]);
            go_on();
        }
    }
    __device__ u32 await() const {
        smem.p_full[ring.stage].wait(ring.parity);
        return ptx::uniform(smem.told[ring.stage]);
    }
    __device__ void go_on() {
        loads.load(args, smem, ring);
        ring.advance();
    }
    __device__ void run() {
        while (true) {
            if (await() & what::is_end) return;
            loads.load_rest(args, smem, ring);
            give_back();
            loads.work(args, smem, ring, 1);
            go_on();
            // Of no use to the first product, which clears O. But if O were undefined here, it would be kept twice, and if it were
            // alive while Q is taken, what loads know would be spilled, in the loop over tiles, too.
#pragma unroll
            for (float& x : o) x = 0.f;
            u32 told;
            do {
                told = await();
#pragma unroll 1
                for (add_tile(told); !(told & what::ends); add_tile(told)) {
                    give_back();
                    go_on();
                    told = await();
                }
                end_split(told);
            } while (!(told & what::releases));
        }
    }
};

__device__ void sum_values(const Args& args, Smem& smem) {
    ptx::setmaxnreg_dec<cfg::summer_registers>();
    Summer summer(args, smem);
    summer.loads.begin(args, smem);  // behind setmaxnreg: it may wait for a work that warpgroup 0 finds with the registers that are given up here
    summer.run();
}

extern "C" __global__ __launch_bounds__(384, 1) void attn_mla(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        Kv::prefetch(args);
        for (int i = 0; i < stages; ++i) {
            smem.full[i][0].init(Kv::Loads::arrivals), smem.full[i][1].init(Kv::Loads::arrivals);
            smem.p_full[i].init(4), smem.go[i].init(4), smem.empty[i].init(8 * Members::readers);
        }
        for (int i = 0; i < 2; ++i) smem.work_full[i].init(1), smem.work_empty[i].init(8 * Members::readers);
        Kv::Loads::init(smem.loader);
        ptx::fence_mbarrier_init();
    }
    if (threadIdx.x < 32) Rows::prefetch(args);
    Members::begin();
    const u32 warp = ptx::uniform(threadIdx.x / 32);
    const bool early = Launch::uses_pdl && Members::finds() && warp == 0 && args.batches <= most_early;
    if (!early) {
        Launch::wait();
        Launch::launch_dependents();
    }
    if (warp == 0) begin(args, smem, early);
    if (warp < 4) weigh(args, smem);
    else sum_values(args, smem);
    Members::end();
}
