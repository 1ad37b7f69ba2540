// Backward attention on any GPU from Ampere on, with mma.sync and cp.async, keys stationary. With p the weights of the forward:
//
//   p = exp2(scale_log2 score(q k') - lse_log2)    dp = do v'    ds = p score' (dp - delta)
//   dv = p' do    dk = scale ds' q    dq = scale ds k
//
// A block owns cfg::tile_kv keys of one head of k and v and goes over the query tiles that keep any of them, for each query head of
// the group: dk and dv stay in registers, whole, without atomics. cfg::sharing warps have the same 16 * cfg::m_tiles_per_warp keys.
// S and dP are transposed (a row is a key), and each of these warps computes them for its part of the queries, or adds its part of the
// columns to them: the option Sharing says which. Then each computes dk and dv of its part of the columns, for all of the tile's
// queries: with all of them, a warp has P' and dS' as left operands in its registers; else they meet in shared memory. dq needs dS of all keys, and is shared out again; its parts go from registers to the sum of their
// tile in scratch, where DqStore sets the order. Every thread loads: K and V once, Q and dO a step ahead.
// Numbers have 16 bits or 32, sums 32. A product goes over blocks of 16 x 16 numbers: Blocks brings them from tiles to registers and
// makes them of sums, Element multiplies them.
// NaN or inf in q, k, v or do may reach what else has rows in the same tile, since 0 times NaN is NaN.
//
//   barrier                  arrives        waits          protects
//   copy group of a step     its copies     its thread     a thread's part of Q, dO, lse, delta (of K and V) until it is there
//   __syncthreads, first     every thread   every thread   all parts until they are there; of the step before: Q, dO, dS, P until
//                                                          read, its part of dq until added; of that before it: its turn until passed on
//   __syncthreads, second    every thread   every thread   dS, P, smem.places, smem.turns until written; smem.steps of this step until
//                                                          read; where a warp has keys alone: Q and dO until read
//   __syncthreads, third     every thread   every thread   dO until read, where it has one stage and several warps share keys
//   __syncthreads, fourth    every thread   every thread   Q likewise
//   the option Sharing may have named barriers between the warps that have the same keys: smem.sums until written, and until read
//   args.turns[tile]         first thread   every thread   a dq tile: key tiles add in one order
//
// A turn is passed on a step later, when the adds are long under way: the fence before it then has little to wait for. Each thread asks
// whether its own has come before it multiplies dq, and looks at the answer before it adds. The copies of the next step, and the place
// and turn of this one's dq, come behind a product, whose last mma.sync are on their way meanwhile.

#include "config.cuh"  // rendered: cfg, StridedTensor, StridedOutput, Args, and the options
                       // Element, Blocks, Sharing, Rows, Mask, Score, Weight, Group, DkvBlocks, Scheduler, Turn, Walk, DqStore, Launch
#include "tile/facts.cuh"
#include "tile/swizzled.cuh"
#include "tile/warp_sums.cuh"
#include "variant/group/interface.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/dq/red_interface.cuh"

template <int rows, int columns>
using Tile = SwizzledTile<rows, columns, sizeof(Element)>;
using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Tile<cfg::tile_kv, cfg::head_dim_v>;
using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using DoTile = Tile<cfg::tile_q, cfg::head_dim_v>;
using PTile = Tile<cfg::tile_kv, cfg::tile_q>;  // a row is a key

using Step = Walk::Step;  // a query tile that keeps keys of the block's, of one query head; head < 0: none is left
struct Smem {
    KTile k;
    VTile v;
    QTile q[cfg::q_stages];
    DoTile d_o[cfg::do_stages];
    PTile ds[Sharing::meets ? 2 : 1];  // and P
    alignas(16) float lse_log2[2][cfg::tile_q], delta[2][cfg::tile_q];
    Step steps[2];  // this one and the next
    i32 places[2];  // of dq tiles: this step's and that of the step before
    Turn turns[2];
    Walk::Board board;
    KvWorkTile work;  // here to free registers, as the sequence
    alignas(8) unsigned char rows[sizeof(Rows)];
    [[no_unique_address]] alignas(16) Sharing::Board sums;
};
template struct BlocksOption<Blocks, Element, PTile>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct KvSchedulerOption<Scheduler>;
template struct GroupOption<Group>;
template struct DqRedOption<DqStore>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

constexpr int warp_count = cfg::threads / 32, m_tiles = cfg::m_tiles_per_warp;
constexpr int chunk_q = cfg::chunk_q, part_q = Sharing::queries, q_chunks = part_q / chunk_q;  // of a warp's queries
constexpr int blocks = QTile::blocks, v_blocks = DoTile::blocks;                                          // of 16 columns
constexpr int dk_blocks = ceil_div(blocks, cfg::sharing), dv_blocks = ceil_div(v_blocks, cfg::sharing);
constexpr int dq_column_warps = warp_count / cfg::dq_row_warps;
constexpr int dq_blocks = ceil_div(blocks, dq_column_warps), dq_m_tiles = cfg::tile_q / 16 / cfg::dq_row_warps;
static_assert(cfg::tile_kv * cfg::sharing == warp_count * 16 * m_tiles && q_chunks * chunk_q == part_q && chunk_q % 16 == 0);
static_assert(warp_count % cfg::dq_row_warps == 0 && dq_m_tiles * cfg::dq_row_warps * 16 == cfg::tile_q);

// Pairs of queries and keys: what they are weighed by, and this thread's first of each.
struct Pairs {
    const Mask& mask;
    const Score& score;
    const i32 q, kv;
};
// This is what a step has of its queries, and the factor of all weights.
struct Stage {
    const QTile& q;
    const DoTile& d_o;
    const float *lse_log2, *delta;
    const float factor;
};
using Sums = float[m_tiles][8];      // of 16 columns, and this warp's keys: a block of 16 x 16 for each 16 keys
using Operand = u32[Blocks::words];  // a block of numbers, a lane's words
using Words = Operand[m_tiles];      // Sums as A operands
using DqSums = float[dq_blocks][dq_m_tiles][8];
using DqNumbers = Vector<float, cfg::dq_vector>;  // that are added at once
constexpr int dq_lanes = 2 * cfg::tile_q / cfg::dq_vector;

// A thread's numbers for the queries of a block: lse_log2 or delta, four of them.
struct QueryStatistics {
    float x[4];

    __device__ explicit QueryStatistics(const float* of) {
        const float2 low = *reinterpret_cast<const float2*>(of), high = *reinterpret_cast<const float2*>(of + 8);
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
    __device__ float operator[](int i) const { return x[i / 4 * 2 + i % 2]; }  // for a thread's i-th number of a block
};

// From dot products to weights, of which s keeps the score's derivative times them. `kept` says of which pairs.
template <int n, class Kept, class Weights>
__device__ void weigh(Sums (&s)[n], Words (&p)[n], const Pairs& pairs, const Kept& kept, const Weights& weights, const float* lse_log2) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
        const QueryStatistics lse(lse_log2 + 16 * j);
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
            float w[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const i32 q = pairs.q + 16 * j + block_column(e), kv = pairs.kv + 16 * i + block_row(e);
                const float x = s[j][i][e] * cfg::scale_sign;
                const float exponent = __fmaf_rn(pairs.score(x, q, kv), pairs.score.scale_log2, -lse[e]);
                const float weight = ptx::exp2(kept(j, i, e) ? exponent : minus_inf);
                w[e] = weights(weight, j * m_tiles + i, e);
                s[j][i][e] = weight * pairs.score.derivative(x, q, kv);
            }
            Blocks::pack(p[j][i], w);
        }
    }
}
// ds, of s and of the gradients of weights.
template <class Weights, int n>
__device__ void differentiate(const Sums (&s)[n], const Sums (&dp)[n], Words (&ds)[n], const Weights& weights, float factor, const float* delta) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
        const QueryStatistics d(delta + 16 * j);
#pragma unroll
        for (int i = 0; i < m_tiles; ++i) {
            float x[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] = s[j][i][e] * (weights(dp[j][i][e], j * m_tiles + i, e) * factor - d[e]);
            Blocks::pack(ds[j][i], x);
        }
    }
}

// This is what a warp computes. Its part of the columns is every cfg::sharing-th block of 16, or of dq every dq_column_warps-th.
struct Warp {
    Smem& smem;
    const u32 warp = ptx::uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const u32 member = warp % cfg::sharing;  // of those that share keys
    const u32 first_key = warp / cfg::sharing * (16 * m_tiles);
    Sums dk[dk_blocks], dv[dv_blocks];

    __device__ explicit Warp(Smem& smem) : smem(smem) {
        clear(dk);
        clear(dv);
    }

    // sums = a b' of this warp's keys and queries from first_q on; `again`: of this step others were made before.
    template <int steps, class A, class B>
    __device__ void multiply_columns(Sums (&sums)[chunk_q / 16], const A& a, const B& b, u32 first_q, bool again) const {
        constexpr int stride = Sharing::stride, own = ceil_div(steps, stride);
        const u32 first = Sharing::first_block(member);
        const Blocks::Left<A> keys(a, first_key, first);
        const Blocks::Right<B> queries(b, first_q, first);
        const auto empty = [&](Operand& to, int step) {  // past the last column
            if (steps % stride != 0 && step * stride + first >= steps)
#pragma unroll
                for (u32& x : to) x = 0;
        };
        clear(sums);
        const auto load_keys = [&](Operand& to, int step, int i) { keys.load(to, i, step * stride), empty(to, step); };
        const auto load_queries = [&](Operand& to, int step, int j) { queries.load(to, j, step * stride), empty(to, step); };
        multiply<own, Blocks::unrolled(own)>(sums, load_keys, load_queries);
        Sharing::add_up(smem.sums, sums, member, again);
    }
    // sums += a b over queries from first_q on, for this warp's part of the columns; `unrolled` steps at a time.
    template <int steps, int unrolled, int columns, class A, class B>
    __device__ void multiply_queries(Sums (&sums)[columns], A a, const B& b, u32 first_q, u32 lane) const {
        const Blocks::RightTransposed<B> queries(b, first_q, member, lane);
        multiply<steps, unrolled>(sums, a, [&](Operand& to, int step, int j) { queries.load(to, step, j * cfg::sharing); });
    }
    // Of P' or dS' in registers, which only code without a loop can index.
    template <int columns, class B>
    __device__ void multiply_own(Sums (&sums)[columns], const Words (&a)[chunk_q / 16], const B& b, u32 first_q) const {
        const auto load = [&](Operand& to, int step, int i) {
#pragma unroll
            for (int k = 0; k < Blocks::words; ++k) to[k] = a[step][i][k];
        };
        multiply_queries<chunk_q / 16, chunk_q / 16>(sums, load, b, first_q, ptx::lane_id());
    }
    // Of P' or dS' of all warps that share the keys.
    template <int columns, class B>
    __device__ void multiply_shared(Sums (&sums)[columns], const PTile& a, const B& b) const {
        const Blocks::Left<PTile> keys(a, first_key);
        const auto load = [&](Operand& to, int step, int i) { keys.load(to, i, step); };
        multiply_queries<cfg::tile_q / 16, Blocks::unrolled(cfg::tile_q / 16)>(sums, load, b, 0, lane);
    }
    // Writes P' or dS' where other warps read it.
    __device__ void leave(PTile& to, const Words (&words)[chunk_q / 16], u32 first_q) const {
        const Blocks::Writer<PTile> writer(first_key, first_q / 16, ptx::lane_id());
#pragma unroll
        for (int j = 0; j < chunk_q / 16; ++j) {
            if (!Sharing::leaves(j, member)) continue;
#pragma unroll
            for (int i = 0; i < m_tiles; ++i) writer.store(to, i, j, words[j][i]);
        }
    }

    // P and dS of this warp's keys and chunk_q queries; `meanwhile` is called behind the product of S.
    template <class Weights, class Meanwhile>
    __device__ void weigh_chunk(const Stage& stage, const Pairs& pairs, const Weights& weights, bool full, u32 first_q, Meanwhile meanwhile) {
        Sums s[chunk_q / 16], dp[chunk_q / 16];
        Words words[chunk_q / 16];
        multiply_columns<blocks>(s, smem.k, stage.q, first_q, false);
        meanwhile();
        const float* lse_log2 = stage.lse_log2 + first_q + lane % 4 * 2;
        if (full) weigh(s, words, pairs, EveryPair{}, weights, lse_log2);
        else weigh(s, words, pairs, kept_pairs<chunk_q / 16>(pairs.mask, pairs.q, pairs.kv), weights, lse_log2);
        if (!Sharing::meets) multiply_own(dv, words, stage.d_o, first_q);
        else leave(smem.ds[Sharing::meets], words, first_q);
        multiply_columns<v_blocks>(dp, smem.v, stage.d_o, first_q, true);
        if (Sharing::meets) __syncwarp();  // else NVRTC 13.0 goes on in the midst of the product, and spills
        differentiate(s, dp, words, weights.again(), stage.factor, stage.delta + first_q + lane % 4 * 2);
        leave(smem.ds[0], words, first_q);
        if (!Sharing::meets) multiply_own(dk, words, stage.q, first_q);
    }
    // Adds this block's part of dq of a tile to its sum.
    __device__ void add_dq(const Args& args, i32 place, const Turn& turn) const {
        DqSums dq;
        const u32 column = warp % dq_column_warps, row_block = warp / dq_column_warps * dq_m_tiles;
        const u32 lane = ptx::lane_id();
        const Blocks::LeftTransposed<PTile> queries(smem.ds[0], 0, row_block, lane);
        const Blocks::RightTransposed<KTile> keys(smem.k, 0, column, lane);
        clear(dq);
        const auto load_ds = [&](Operand& to, int step, int i) { queries.load(to, step, i); };
        const auto load_k = [&](Operand& to, int step, int j) { keys.load(to, step, j * dq_column_warps); };
        const i32 asked = DqStore::ask(args, place);
        multiply<cfg::tile_kv / 16, Blocks::unrolled(cfg::tile_kv / 16)>(dq, load_ds, load_k);
        const bool first = DqStore::wait(args, place, turn, asked);
        DqNumbers* sum = reinterpret_cast<DqNumbers*>(args.dq_sum + i64(place) * (cfg::tile_q * cfg::head_dim));
        DqNumbers* to = sum + column * (8 * dq_lanes) + row_block * 32 + lane;
        if (first) add_parts(to, dq, column, true);  // one branch for all
        else add_parts(to, dq, column, false);
    }
    // The sum lies as accumulators of 16 x 8 do: those of 16 rows after each other, then those of the next eight columns; of each the
    // lanes' first numbers, where cfg::dq_vector is 1, or all four of a lane.
    __device__ static void add_parts(DqNumbers* to, const DqSums& dq, u32 column, bool first) {
#pragma unroll
        for (int j = 0; j < dq_blocks; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (8 * (2 * (j * dq_column_warps + column) + half) >= cfg::head_dim) continue;
#pragma unroll
                for (int i = 0; i < dq_m_tiles; ++i)
#pragma unroll
                    for (int e = 0; e < 4; e += cfg::dq_vector) {
                        DqNumbers numbers;
#pragma unroll
                        for (int k = 0; k < cfg::dq_vector; ++k) numbers.x[k] = dq[j][i][4 * half + e + k];
                        DqStore::add(to + ((2 * j * dq_column_warps + half) * 4 + e) * dq_lanes + i * 32, numbers, first);
                    }
            }
    }
};

// A block at its work.
struct Block {
    const Args& args;
    Smem& smem;
    const KvWorkTile& work;
    const Rows& rows;
    Warp& warp;
    u32 count = 0;  // of steps

    __device__ i32 kv_begin() const { return work.kv_tile * cfg::tile_kv; }
    __device__ i32 first_key() const { return kv_begin() + i32(warp.first_key + warp.lane / 4); }  // of this thread

    __device__ void load_kv() {
        smem.k.fill(matrix_of(args.k, rows.kv, Group::kv_head(args, work)), kv_begin(), rows.kv_len - 1);
        smem.v.fill(matrix_of(args.v, rows.kv, Group::kv_head(args, work)), kv_begin(), rows.kv_len - 1);
    }
    // Q and lse of the block's step of this number, if there is one; dO and delta.
    __device__ void load_q(u32 number) {
        const Step step = smem.steps[number % 2];
        if (step.head < 0) return;
        smem.q[number % cfg::q_stages].fill(matrix_of(args.q, rows.q, step.head), step.tile * cfg::tile_q, rows.q_len - 1);
        load_statistics(smem.lse_log2[number % 2], args.lse_log2, step);
    }
    __device__ void load_do(u32 number) {
        const Step step = smem.steps[number % 2];
        if (step.head < 0) return;
        smem.d_o[number % cfg::do_stages].fill(matrix_of(args.d_o, rows.q, step.head), step.tile * cfg::tile_q, rows.q_len - 1);
        load_statistics(smem.delta[number % 2], args.delta, step);
    }
    __device__ void load_statistics(float* to, const float* from, const Step& step) const {
        if (threadIdx.x >= cfg::tile_q / 4) return;
        const i64 first = i64(place_of(args, rows, step.head, step.tile)) * cfg::tile_q;
        ptx::cp_async(ptx::smem_address(to + 4 * threadIdx.x), from + first + 4 * threadIdx.x);
    }

    // The first threads find the steps: they go on from the next one to that after it.
    __device__ void keep_step(u32 number, const Step& step) {
        if (threadIdx.x == 0) smem.steps[number % 2] = step;
    }
    __device__ void find_step() {
        if (threadIdx.x >= Walk::threads) return;
        const Step next = smem.steps[(count + 1) % 2];
        if (next.head >= 0) keep_step(count, Walk::after(args, rows, work, smem.board, next));
    }
    __device__ void find_first_steps() {
        if (threadIdx.x >= Walk::threads) return;
        const Step first = Walk::first(args, rows, work, smem.board);
        keep_step(0, first);
        keep_step(1, first.head >= 0 ? Walk::after(args, rows, work, smem.board, first) : first);
    }
    // The first thread's part in the order of adds.
    __device__ void pass_turn() const {
        const u32 before = (count + 1) % 2;
        if (threadIdx.x == 0) DqStore::release(args, smem.places[before], smem.turns[before]);
    }
    // By a thread of another warp than the one that finds steps.
    __device__ void find_turn() {
        if (threadIdx.x != 32) return;
        const Step step = smem.steps[count % 2];
        smem.places[count % 2] = place_of(args, rows, step.head, step.tile);
        smem.turns[count % 2] = Walk::turn(args, rows, work, step);
    }
    __device__ WorkTile work_tile(const Step& step) const { return {work.batch, step.head, step.tile * cfg::tile_q, 0}; }

    // Where this step's part of dq goes, and the next step's copies where there is a second stage.
    __device__ void prepare() {
        find_turn();
        if (cfg::q_stages == 2) load_q(count + 1);
        if (cfg::do_stages == 2) load_do(count + 1);
        ptx::cp_async_commit();
    }
    // P and dS of this warp's keys and queries.
    __device__ void weigh(const Stage& stage) {
        const Step step = smem.steps[count % 2];
        const WorkTile own = work_tile(step);
        const Mask mask(args, rows, own);
        const Score score(args, rows, own);
        const Weight weight(args, rows, own);
#pragma unroll 1
        for (int i = 0; i < q_chunks; ++i) {
            const i32 first = i32(Sharing::first_query(warp.member)) + i * chunk_q;
            const Pairs pairs = {mask, score, own.q_begin + first + i32(warp.lane) % 4 * 2, first_key()};
            const auto weights = weight.template kept<chunk_q / 16, m_tiles>(pairs.q, pairs.kv);
            warp.weigh_chunk(stage, pairs, weights, step.full, first, [&] {
                if (i == 0) prepare();
            });
        }
    }
    // What is loaded next takes the place of what was read for the last time.
    __device__ void do_step() {
        const u32 at = count % 2;
        const Stage stage = {smem.q[count % cfg::q_stages], smem.d_o[count % cfg::do_stages], smem.lse_log2[at], smem.delta[at], Weight::factor(args)};
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (count > 0) pass_turn();
        weigh(stage);
        __syncthreads();
        if (Sharing::meets) warp.multiply_shared(warp.dv, smem.ds[Sharing::meets], stage.d_o);
        find_step();
        if (Sharing::meets && cfg::do_stages == 1) __syncthreads();
        if (cfg::q_stages == 1 && !Sharing::meets) load_q(count + 1);
        if (cfg::do_stages == 1) load_do(count + 1);
        warp.add_dq(args, smem.places[at], smem.turns[at]);
        if (Sharing::meets) {
            warp.multiply_shared(warp.dk, smem.ds[0], stage.q);
            if (cfg::q_stages == 1) {
                __syncthreads();
                load_q(count + 1);
            }
        }
        ptx::cp_async_commit();
        ++count;
    }
    template <int n>
    __device__ void store_sums(const StridedOutput& to, i32 chunks, const Sums (&sums)[n], float scale) const {
        const RowsOut out = {to.rows(rows.kv, work.kv_head), to.row_bytes, rows.kv_len};
        DkvBlocks::store<cfg::sharing>(out, first_key(), warp.member, chunks, sums, scale);
    }
    __device__ void store() const {
        store_sums(Group::dk(args), cfg::head_dim / 8, warp.dk, args.scale * cfg::scale_sign);
        store_sums(Group::dv(args), cfg::head_dim_v / 8, warp.dv, Weight::factor(args));
    }
    __device__ void run() {
        if (smem.steps[0].head >= 0) {
            load_kv();
            load_q(0);
            load_do(0);
            ptx::cp_async_commit();
            do do_step();
            while (smem.steps[count % 2].head >= 0);
            __syncthreads();
            pass_turn();
        }
        store();
    }
};

__device__ void attend(const Args& args, Smem& smem, const KvWorkTile& work) {
    Rows& rows = reinterpret_cast<Rows&>(smem.rows);
    Warp warp(smem);
    Block block{args, smem, smem.work, rows, warp};
    if (threadIdx.x == 0) smem.work = work, rows = Rows(args, work.batch);
    if (threadIdx.x < 32) __syncwarp();
    block.find_first_steps();
    __syncthreads();
    block.run();
}

extern "C" __global__ __launch_bounds__(cfg::threads, cfg::ctas_per_sm) void attn_bwd_mma(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) unsigned char raw[];
    Launch::wait();
    Launch::launch_dependents();
    Scheduler scheduler(args);
    const KvWorkTile work = scheduler.next();
    if (!work.is_last()) attend(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
