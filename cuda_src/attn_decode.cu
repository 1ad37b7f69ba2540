// Attention of few queries over cached keys (decoding): o = softmax(mask(score(q k^T))) v, with mma.sync.
//
// Rows are the queries of all heads that share a key head, cfg::tile_q of them in a work. Blocks are persistent: each takes an equal
// share of all key tiles, which it finds from the lengths on the device. Warp 0 loads the tiles of its share, first ones first, into
// a ring; where it copies them row by row, others copy a part of each with it, and find their way by themselves. Every 16 rows have
// four other warps, of which each computes whole tiles by itself: warp w those whose number is w modulo 4. At the end of a split the
// four results become one, of which each warp has a quarter of the columns. Splits, and the order in which they are folded, follow
// from the sequence alone (tile/splits.cuh): a row has the same bits in any batch, on any grid, for any pages.
//
//   barrier               arrives                       waits               protects
//   k_full[b], v_full[b]  TMA (bytes), or copies        the tile's warps    K, V of a stage until read
//   empty[b]              a lane of each of them        producer            both until refilled; what the option Walk tells of a tile, with K
//   given                 a lane of the producer        a consumer          smem.next, .line
//   taken                 that consumer                 producer            smem.next until the next work
//   q_full[n % q_tiles]   the producer's lanes, copies  consumers           smem.q[n % q_tiles] of work n, until all have taken the next
//   listed                a lane of the producer        a consumer          smem.pieces, .owner
//   named barrier 1       consumers                     consumers           smem.work, .is_last
//   named barrier 2 + m   those of 16 rows              they                smem.own[m]
//   named barrier 4       producers                     producers           what they have seen, in smem.own[0]
//   args.arrived[block]   blocks with splits of the work of which that block has the first, as many as splits; the last to arrive
//                         folds, and sets it back to zero. A block has but one such work that goes on in other blocks
//
// Who changes lengths while blocks look at them tears the launch: blocks see other shares, and may wait for nobody or leave arrivals that
// nobody folds. What it computes is then undefined, but it lies in its memory, and the next launch is right (end_counting).
//
// Barriers are as many as stages, rounded up to a multiple of four: then the tiles that use one, one after the other, are of the same
// warp. With one for each stage a warp could come to the next tile of a stage while the one before was still on its way, to another
// warp, and take the end of the phase before that one for its own: parities tell only neighbours apart, and tiles come out of order.
//
// A block with the first splits of a work folds them as it goes. Others leave theirs in global memory: one state for each split, or
// for each group of splits that they have from its beginning. No vote of a warp looks at a number: rows do not see each other.

#include "config.cuh"  // rendered: cfg, Args, and the options
                       // Element, QElement, KvElement, OElement, QOperand, Rows, Mask, Score, Softmax, Weight, Kv, Walk, Scheduler, Store, Launch
#include "ptx/barrier.cuh"
#include "ptx/cp_async_mbarrier.cuh"
#include "tile/facts.cuh"
#include "tile/fold.cuh"
#include "tile/paged_tile.cuh"
#include "tile/range.cuh"
#include "tile/softmax.cuh"
#include "tile/strand.cuh"
#include "tile/strided_tensor.cuh"
#include "variant/interfaces.cuh"

using QTile = SwizzledTile<cfg::tile_q, cfg::head_dim>;
using KTile = PagedTile<cfg::tile_kv, cfg::head_dim * sizeof(KvElement), cfg::page_rows>;
using VTile = PagedTile<cfg::tile_kv, cfg::head_dim_v * sizeof(KvElement), cfg::page_rows>;
using Operands = KvElement::Operands;

constexpr u32 barriers = (cfg::stages + 3) / 4 * 4;

struct Own {  // of 16 rows
    union {
        struct {
            Strands strands;
            KeptState group, groups;  // of the splits so far in their group, and of the groups before
        };
        PieceFactors factors;  // when a work's states are there
    };
};
using OwnStrand = Strand<QTile, KTile, VTile>;
struct Ring {
    KTile k[cfg::stages];
    VTile v[cfg::stages];
};
// This is what a block does of a work. Producers alone find it out: its code is long, and nobody has it in an instruction cache.
struct Work {
    SplitRun run;
    TileRange tiles;  // of the work's rows
    Rows::Keys keys;
    i32 rows;
    u32 ahead;  // tile t is tile t + `ahead` of the block's share, which is its place in the ring
    u32 n;      // of the block's works
};
struct Smem {
    Ring ring;
    QTile q[cfg::q_tiles];  // of a work, and of the next
    Own own[cfg::m_tiles];
    Kv::Barrier k_full[barriers], v_full[barriers], empty[barriers], given, taken, listed;
    ptx::PolledMbarrier q_full[cfg::q_tiles];
    Work next, work;                // the producer's, and the consumers' copy of it
    u32 parity;                     // of the next wait for `given`
    alignas(16) i32 pieces[cfg::most_pieces];  // slots of the states that the work's blocks leave, split_group for each group; -1 for none
    i32 owner, is_last;             // the block with the work's first split
    u32 half;                       // the first bit in which arrivals are counted
    Walk::Board board;
};
template struct ElementOption<Element>;
template struct OperandsOption<KvElement>;
template struct QOperandOption<QOperand, QTile>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct WeightOption<Weight>;
template struct PagedKvOption<Kv, KTile, VTile>;
template struct SplitWalkOption<Walk, Mask>;
template struct SharesOption<Scheduler>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 32 * cfg::warps, Launch::uses_pdl};

__device__ u32 stage(u32 place) { return place % cfg::stages; }
__device__ u32 barrier(u32 place) { return place % barriers; }
__device__ u32 parity(u32 place) { return place / barriers % 2; }

// Brings the tiles with which a block begins to L2: as many as the ring has.
__device__ void prefetch(const Kv& kv, TileRange tiles) {
#pragma unroll 1
    for (i32 tile = tiles.begin; tile < min(tiles.end, tiles.begin + i32(cfg::stages)); ++tile) kv.prefetch(tile);
}

// By a warp: loads Q of a work, each lane some of a row, with zeros in place of rows that are not there.
__device__ void load_q(const Args& args, const Rows& rows, const WorkTile& work, QTile& q, ptx::PolledMbarrier& full) {
    constexpr i32 lanes = 32 / cfg::tile_q;  // that share a row
    const i32 row = i32(threadIdx.x) % 32 / lanes;
    const bool inside = work.q_begin + row < rows.q_len;
    const u32 to = ptx::smem_address(&q);
    const unsigned char* const from = args.q.data + rows.offset({args.q.batch_bytes, args.q.row_bytes, args.q.head_bytes}, inside ? work.q_begin + row : 0, work.head);
#pragma unroll
    for (i32 i = 0; i < QTile::chunks; i += lanes) {
        const i32 chunk = i + i32(threadIdx.x) % lanes;
        ptx::cp_async(to + QTile::offset(fragment_place(row), chunk), from + chunk * 16, inside ? 16 : 0);
    }
    full.arrive_after_copies();
}

// What a producer has seen of the lengths lies where consumers later exchange what they found.
constexpr i32 most_seen = sizeof(Strands) / sizeof(SeenLength) / cfg::producers;
constexpr i32 most_early = 32;  // sequences: what this hides is latency, 1 to 2 us at 16 of them
static_assert(most_early <= most_seen, "each producer keeps the lengths that it has seen");

// Loads what the block computes. `early`: the launch before may still run; false where it has then changed what had been read.
__device__ bool produce(const Args& args, Smem& smem, bool early) {
    SeenLength* const seen = reinterpret_cast<SeenLength*>(&smem.own[0].strands) + threadIdx.x / 32 * most_seen;
    Scheduler scheduler(args, early ? seen : nullptr);
    SplitRun before{};
    u32 place = 0;
    for (u32 n = 0;; ++n) {
        const auto [run, rows] = scheduler.next(args);
        const TileRange own = Walk::span(args, rows, run, min(run.q_begin + cfg::tile_q, rows.q_len));
        const TileRange tiles = run.splits.clip(own, run.split, run.split_end);
        if (early && n == 0) {
            if (!run.is_last()) prefetch(Kv(args, rows, run), tiles);
            Launch::wait();
            Launch::launch_dependents();
            const bool holds = Scheduler::holds(args, seen);
            if (cfg::producers > 1) ptx::bar_sync(4, 32 * cfg::producers);  // `seen` of all of them is read
            if (!holds) return false;
        }
        if (threadIdx.x < 32) {
            smem.taken.wait(n % 2 ^ 1);
            __syncwarp();  // a lane that comes late would wait for a phase with the same parity, which may not come
            if (n > 0 && !before.is_whole()) list_pieces(args, smem, scheduler.line, before);
        }
        if (threadIdx.x == 0) {
            if (n > 0) smem.listed.arrive();
            smem.next = {run, own, rows.keys(), min(cfg::tile_q, rows.q_len - run.q_begin), place - tiles.begin, n};
            smem.given.arrive();
        }
        if (run.is_last()) break;
        before = run;
        const Kv kv(args, rows, run);
        const i32 begin = tiles.begin < tiles.end ? tiles.begin : behind_all;  // there Q alone is loaded
        const Mask mask(args, rows, run);  // after the launch before: it may read what that writes
        Walk walk(mask, rows, run);
        i32 next = walk.classify(begin), second = walk.classify(begin + 1);
        auto found = kv.find(Walk::where(begin, next)), after = kv.find(Walk::where(begin + 1, second));
        if (threadIdx.x < 32) {  // while pages are looked up
            if (cfg::q_tiles == 1) smem.taken.wait(n % 2), __syncwarp();
            load_q(args, rows, run, smem.q[n % cfg::q_tiles], smem.q_full[n % cfg::q_tiles]);
        }
        for (i32 tile = begin; tile < tiles.end; ++tile, ++place) {
            const auto pages = found;
            const u32 last = place - cfg::stages;  // which had the stage
            const i32 kept = next;
            next = second, second = walk.classify(tile + 2);
            found = after, after = kv.find(Walk::where(tile + 2, second));
            if (place >= cfg::stages) smem.empty[barrier(last)].wait(parity(last)), __syncwarp();
            Walk::tell(smem.board, stage(place), kept);
            Kv::Barrier &k_full = smem.k_full[barrier(place)], &v_full = smem.v_full[barrier(place)];
            if (kept) kv.load(smem.ring.k[stage(place)], smem.ring.v[stage(place)], k_full, v_full, tile, pages);
            else Kv::pass(k_full, v_full);
        }
    }
    if (threadIdx.x < 32) end_counting(args);
    ptx::cp_async_commit(), ptx::cp_async_wait<0>();  // no warp ends while copies of its are on their way
    return true;
}

struct Consumer {
    static constexpr u32 first_thread = 32 * cfg::producers;

    const Args& args;
    Smem& smem;
    const u32 warp, m;  // of the four that share 16 rows, and which rows these are
    Own& own;
    OwnStrand strand;

    __device__ Consumer(const Args& args, Smem& smem) : Consumer(args, smem, ptx::uniform(threadIdx.x / 32) - cfg::producers) {}
    __device__ Consumer(const Args& args, Smem& smem, u32 index)
        : args(args), smem(smem), warp(index % 4), m(index / 4), own(smem.own[m]), strand(smem.q[0], smem.ring.k[0], smem.ring.v[0], 16 * m) {}

    // The thread's number among the four warps, anew at each use: what follows from it would take registers over all key tiles.
    __device__ u32 thread() const { return 32 * warp + ptx::lane_id(); }
    // The thread's upmost row in the work, and whether there is such a row.
    __device__ i32 top_row() const { return m * 16 + first_row(); }
    __device__ bool has_rows() const { return top_row() < smem.work.rows; }
    __device__ bool is_first() const { return threadIdx.x == first_thread; }

    __device__ static void meet() { ptx::bar_sync(1, 128 * cfg::m_tiles); }
    __device__ void meet_strands() const { ptx::bar_sync(2 + m, 128); }

    __device__ u32 q_place() const { return smem.work.n % cfg::q_tiles; }  // anew at each use, too
    __device__ void await_q() {
        const u32 place = q_place();
        smem.q_full[place].wait(smem.work.n / cfg::q_tiles % 2);
        // The states of the work before are done with, and a warp that is ahead writes there when all have met again.
        strand.q_operand.prepare(args, smem.work.run, smem.q[place], 16 * m, reinterpret_cast<float*>(&own.group), [this] { meet_strands(); });
        strand.keep_q(place * sizeof(QTile));
    }

    // From dot products to logits, -inf where the mask keeps no key; `first`: this thread's first key, `row` its upmost row. The few
    // tiles that need a mask make it anew, and keep it in no register.
    __device__ void mask_and_score(const Score& score, float (&s)[OwnStrand::scores], bool full, i32 row, i32 first) const {
        apply(score, s, row, first);
        if (full) return;
        const Mask mask(args, Rows(args, smem.work.run.batch), smem.work.run);
        const auto kept = kept_rows<OwnStrand::scores>(mask, row + row_after(0), row + row_after(1), first);
#pragma unroll
        for (int i = 0; i < OwnStrand::scores; ++i)
            if (!kept(i)) s[i] = minus_inf;
    }
    // One key tile.
    __device__ void attend(const Score& score, const Weight& weight, OnlineSoftmax& softmax, i32 tile) {
        const u32 place = tile + smem.work.ahead, stage = ::stage(place), barrier = ::barrier(place);
        const Rows::Keys there = smem.work.keys.from(tile * cfg::tile_kv);
        smem.k_full[barrier].wait(parity(place));
        const i32 kept = Walk::told(smem.board, stage, smem.work.tiles, tile);
        if (kept == 0) {
            smem.v_full[barrier].wait(parity(place));
            return leave(barrier);
        }
#pragma unroll 1
        for (int first = 0; first < OwnStrand::steps; first += OwnStrand::at_once) {
            float s[OwnStrand::at_once][OwnStrand::scores];
#pragma unroll
            for (int i = 0; i < OwnStrand::at_once; ++i) strand.multiply_qk(s[i], stage * sizeof(KTile) + (first + i) * KTile::block(2, 0), q_place() * sizeof(QTile));
            if (first == 0) {
                smem.v_full[barrier].wait(parity(place));
                if (!there.fill(cfg::tile_kv)) Kv::clear_others(smem.ring.v[stage], there);
            }
#pragma unroll
            for (int i = 0; i < OwnStrand::at_once; ++i) {
                const i32 row = smem.work.run.q_begin + top_row(), key = tile * cfg::tile_kv + (first + i) * OwnStrand::step_keys + i32(threadIdx.x) % 4 * 2;
                mask_and_score(score, s[i], kept == 2, row, key);
                softmax.find_top(s[i]);
                softmax.move();
                softmax.weigh(s[i]);
                softmax.rescale(strand.o);
                apply(weight, s[i], row, key);
                strand.multiply_pv(s[i], stage * sizeof(VTile) + (first + i) * VTile::block(2, 0));
            }
        }
        leave(barrier);
    }
    // The stage has been read.
    __device__ void leave(u32 barrier) {
        Kv::fence_reads();
        __syncwarp();
        if (threadIdx.x % 32 == 0) smem.empty[barrier].arrive();
    }

    // Where warps exchange a block of columns in a pass; -1 for one of another pass.
    __device__ static constexpr int place_in_pass(int block, int pass) {
        const int quarter = block / quarter_blocks, i = block % quarter_blocks;
        return i / merge_blocks == pass ? quarter * merge_blocks + i % merge_blocks : -1;
    }
    // The same for a lane to which columns of this block or of the next are dealt, two blocks in one pass where they can be.
    __device__ static int place_dealt(int block, int pass, u32 lane) {
        constexpr bool together = merge_blocks % Operands::dealt_blocks == 0;
        const int upper = Operands::is_upper(lane) ? 1 : 0, first = place_in_pass(together ? block : block + upper, pass);
        return together && first >= 0 ? first + upper : first;
    }
    // What the four warps found, as one; this warp's quarter of the columns.
    __device__ Quarter merge(const OnlineSoftmax& softmax) {
        Quarter merged;
        const u32 lane = ptx::lane_id();
        const bool mine = has_rows();
#pragma unroll
        for (int r = 0; r < 2; ++r) merged.max[r] = softmax.max[r], merged.sum[r] = quad_sum(softmax.sum[r]);
        own.strands.max_sum[warp][lane] = merged.max_sum();
#pragma unroll
        for (int pass = 0; pass < cfg::merge_passes; ++pass) {
#pragma unroll
            for (int block = 0; block < cfg::head_dim_v / 8; block += Operands::dealt_blocks) {
                const int at = place_dealt(block, pass, lane);
                const float* x = strand.o + fragment_index(block, 0);
                if (at < 0 || !mine) continue;
#pragma unroll
                for (int i = 0; i < Operands::dealt_blocks; ++i) own.strands.o[warp][at][Operands::place(lane, i)] = Operands::pair(x, i);
            }
            meet_strands();
            SoftmaxState<merge_blocks> state[2], next;
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                get(state[pair], 2 * pair, lane), get(next, 2 * pair + 1, lane);
                state[pair].fold(next, softmax.scale_log2);
            }
            state[0].fold(state[1], softmax.scale_log2);
            merged.set(state[0].max_sum());
#pragma unroll
            for (int i = 0; i < merge_blocks; ++i) merged.o[pass * merge_blocks + i] = state[0].o[i];
            meet_strands();
        }
        return merged;
    }
    __device__ void get(SoftmaxState<merge_blocks>& state, int of, u32 lane) const {
        state.set(own.strands.max_sum[of][lane]);
#pragma unroll
        for (int i = 0; i < merge_blocks; ++i) state.o[i] = own.strands.o[of][warp * merge_blocks + i][lane];
    }

    __device__ StateSlot slot(i32 at) const {
        return {reinterpret_cast<float4*>(args.partials) + i64(at) * StateSlot::stride + m * (StateSlot::stride / cfg::m_tiles)};
    }
    __device__ void leave(i32 at, const Quarter& state) const {
        if (has_rows()) slot(at).put(state, thread());
    }
    __device__ void leave_before(i32 place, const Quarter& state) const { leave(slot_before(args, blockIdx.x, place), state); }
    __device__ void leave_after(i32 place, const Quarter& state) const { leave(slot_after(args, blockIdx.x, place), state); }

    // Takes in a split's result.
    __device__ void push(i32 split, const Quarter& state, float scale_log2) {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        const i32 begin = splits.group_begin(split), end = splits.group_end(split);
        if (run.split > begin) return leave_after(split % split_group, state);
        if (split > begin) own.group.fold(state, scale_log2, thread());
        else own.group.put(state, thread());
        if (split + 1 < end && split + 1 < run.split_end) return;
        const Quarter group = own.group.get(thread());
        if (split + 1 < end) leave_before(0, group);
        else if (run.split > splits.begin) leave_after(place_of_group(split), group);
        else if (begin > splits.begin) own.groups.fold(group, scale_log2, thread());
        else own.groups.put(group, thread());
    }

    // The block's next splits; false where there are no more.
    __device__ bool take() {
        if (is_first()) {
            smem.given.wait(smem.parity);
            smem.work = smem.next, smem.parity ^= 1;
            smem.taken.arrive();
        }
        meet();
        return !smem.work.run.is_last();
    }
    __device__ void attend() {
        const SplitRun& run = smem.work.run;
        const Rows rows(args, run.batch);
        const Score score(args, rows, run);
        const Weight weight(args, rows, run);
        await_q();
        for (i32 split = run.split; split < run.split_end; ++split) {
            const i32 begin = smem.work.run.splits.clip(smem.work.tiles, split, split + 1).begin;
            OnlineSoftmax softmax(score.scale_log2);
            strand.clear();
            for (i32 tile = begin + i32((warp - begin) % 4); tile < smem.work.run.splits.clip(smem.work.tiles, split, split + 1).end; tile += 4)
                attend(score, weight, softmax, tile);
            push(split, merge(softmax), score.scale_log2);
        }
        finish(score.scale_log2);
    }

    __device__ void finish(float scale_log2) {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        if (run.is_whole()) {
            if (has_rows()) store(own.groups.get(thread()), thread() % 32, warp * (quarter_blocks * 8), scale_log2);
        } else {
            if (run.split == splits.begin && run.split_end >= splits.group_end(splits.begin))
                leave_before(place_of_groups(run.split_end), own.groups.get(thread()));
            arrive();
            if (smem.is_last) fold_pieces(scale_log2);
        }
        meet();
    }
    // Says that this block's states are there, and finds out whether all are.
    __device__ void arrive() {
        const SplitRun& run = smem.work.run;
        const Splits& splits = smem.work.run.splits;
        meet();
        if (is_first()) {
            smem.listed.wait(smem.parity ^ 1);
            smem.is_last = count_in(args.arrived + smem.owner, run.split_end - run.split, splits.end - splits.begin, smem.half);
        }
        meet();
    }

    __device__ void fold_pieces(float scale_log2) {
        const PieceFold<Consumer> fold{*this, smem.pieces, own.factors};
        fold.run(smem.work.run.splits, smem.work.rows - i32(16 * m), scale_log2,
                 [&](const FloatState& state, i32 lane, i32 column) { store(state, lane, column, scale_log2); });
    }

    // Of the lane that had the rows; `column`: of the state's first block.
    template <int blocks>
    __device__ void store(const SoftmaxState<blocks>& state, i32 lane, i32 column, float scale_log2) const {
        const SplitRun& run = smem.work.run;
        const Rows rows(args, run.batch);
        const Store out(args, rows, run);
        const Softmax softmax(args, rows, run, scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i32 row = run.q_begin + 16 * m + lane / 4 * 2 + r;
            if (row >= rows.q_len) continue;
            LogSum<float> sum{__fmul_rn(state.max[r], scale_log2 * float(ln_2)), state.sum[r]};  // no part of another product's sum
            softmax.finish(row, sum);
            const float factor = sum.inverse();
            OElement* const to = out.o(row) + column + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
                const float4 x = state.o[i];
                if (column + i * 8 < cfg::head_dim_v)
                    *reinterpret_cast<u32*>(to + i * 8) = OElement::pack((r ? x.z : x.x) * factor, (r ? x.w : x.y) * factor);
            }
            if (column == 0 && lane % 4 == 0) out.lse(row, sum.reference + __log2f(sum.total) * float(ln_2));
        }
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    Consumer consumer(args, smem);
    while (consumer.take()) consumer.attend();
}

extern "C" __global__ __launch_bounds__(32 * cfg::warps, 1) void attn_decode(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x < barriers) {
        smem.k_full[threadIdx.x].init(Kv::arrivals), smem.v_full[threadIdx.x].init(Kv::arrivals), smem.empty[threadIdx.x].init(cfg::m_tiles);
        Kv::fence_barriers();
    }
    if (threadIdx.x < cfg::q_tiles) smem.q_full[threadIdx.x].init(32);
    if (threadIdx.x == 0) smem.given.init(1), smem.taken.init(1), smem.listed.init(1), smem.parity = 0;
    if (threadIdx.x == 32 * cfg::producers) Kv::prefetch(args);
    if (threadIdx.x < 32) Rows::prefetch(args);
    __syncthreads();
    bool early = Launch::uses_pdl && threadIdx.x < 32 * cfg::producers && args.batches <= most_early;
    if (!early) {
        Launch::wait();
        Launch::launch_dependents();
    }
    if (threadIdx.x >= 32 * cfg::producers) return consume(args, smem);
#pragma unroll 1
    while (!produce(args, smem, early)) early = false;
}
