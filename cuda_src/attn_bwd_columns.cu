// Backward attention on Hopper for heads whose dk and dv do not fit in the registers of those who own keys (attn_bwd.cu has the formulas).
//
// A block owns cfg::tile_kv keys of one head of k and v, and goes over the query tiles that keep any of them. Its three warpgroups share out the
// columns: each keeps 64 columns of dk and of dv for all of the block's keys in registers, transposed (a row is a column of the head), and
// makes 64 columns of dq. Of S and dP, whose rows are queries, it computes a third of the keys. So P and dS go through shared memory: each
// warpgroup needs those of all keys. Who loads, and how parts of dq meet, is as in attn_bwd.cu.
//
//   barrier              arrives                        waits                    protects
//   work_full, work_empty, kv_full, kv_empty, q_full, q_empty, do_full, do_empty, dq_full, dq_empty, dq_sum: as in attn_bwd.cu
//   p_full, ds_full      one lane per consumer warp     each consumer            smem.p, smem.ds until read
//   p_empty              one lane per consumer warp     each consumer            smem.p until written again
//   args.turns[place]    writer                         other blocks' writers    a dq tile: key tiles add in one order
// Who has seen p_full of a step may write dS: each warpgroup says so when all its products of the step before have ended.
//
// What the tensor cores have to do in a step:
//
//   start S, dP | tell of dq | wait S | P  | all have P, start dv | wait dP | dS | all have dS, start dq, dk | wait dv | wait dq | store dq | wait dk
//    S            S dP                  dP   dP dv                            dv   dv dq dk                               dq dk     dk

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DpMma, DvMma, DkMma, DqMma, and the choices
                       // Element, Rows, Mask, Score, Weight, Statistics, Group, DkvRows, Scheduler, Turn, Walk, DqStore,
                       // DsStore, DqShare
#include "ptx/movmatrix.cuh"
#include "tile/facts.cuh"
#include "tile/tile.cuh"
#include "variant/dq/writer.cuh"
#include "variant/group/interface.cuh"
#include "variant/kv_producer.cuh"

using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Tile<cfg::tile_kv, cfg::head_dim_v>;
using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using DoTile = Tile<cfg::tile_q, cfg::head_dim_v>;
using PairTile = Tile<cfg::tile_q, cfg::tile_kv>;  // of P, and of dS: a row is a query
using DqColumns = DqShare::Of<SmemDescriptor<KTile>>;
constexpr int own_keys = cfg::tile_kv / cfg::consumers;  // of S and dP

struct Smem {
    using DqParts = float4[cfg::dq_parts][cfg::dq_columns / 8][128];
    KTile k;
    VTile v;
    QTile q[cfg::q_stages];
    DoTile d_o[cfg::do_stages];
    PairTile p, ds;
    DqParts dq[cfg::dq_stages];
    alignas(128) float lse_log2[cfg::q_stages][cfg::tile_q];
    alignas(128) float delta[cfg::do_stages][cfg::tile_q];
    ptx::Mbarrier work_full[2], work_empty[2], kv_full, kv_empty;
    ptx::Mbarrier q_full[cfg::q_stages], q_empty[cfg::q_stages], do_full[cfg::do_stages], do_empty[cfg::do_stages];
    ptx::Mbarrier p_full, p_empty, ds_full;
    ptx::Mbarrier dq_full[2][1], dq_empty[2][1], dq_sum[2][1];
    KvWorkTile work[2];
    Turn::Seen seen[2][1];
    Walk::Board board;
};
template <class W, class S> constexpr bool s_holds_weights = requires { requires W::changes_nothing && S::changes_nothing; };
static_assert(s_holds_weights<Weight, Score>, "s does not hold the weights");
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
static_assert(cfg::tile_q == 64 && cfg::dq_parts == cfg::consumers && cfg::dq_columns == 64 && cfg::dq_chains == 1 && cfg::dq_stages == 1);
static_assert(own_keys % 8 == 0 && cfg::tile_kv % 32 == 0 && QTile::panels == cfg::consumers && DoTile::panels == cfg::consumers);
static_assert(Walk::finders + DsStore::fillers + DsStore::readers == 0, "steps are no lists, and dS is for dq alone");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct KvSchedulerOption<Scheduler>;
template struct GroupOption<Group>;
template struct RowsStoreOption<DkvRows>;
template struct DqStoreOption<DqStore>;
template struct DsStoreOption<DsStore, Smem>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true, Walk::needs_all_blocks};

struct Consumer {
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    Step step{};
    Ring<1> kv{};
    Walk::Place place_in_steps{};
    u32 untold = 0;   // 1 + the number, of two, of a part of dq that the writer has not been told of
    float s[SMma::accumulators], dp[SMma::accumulators], dk[DkMma::accumulators], dv[DvMma::accumulators], dq[DqColumns::accumulators];

    __device__ Consumer(const Args& args, Smem& smem) : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128) {}

    // Said by each warp when it has read, or written.
    __device__ void arrive(ptx::Mbarrier& barrier) const {
        if (lane % 32 == 0) barrier.arrive();
    }
    // A third of the keys: rows of K and V.
    template <class Product, class A, class B>
    __device__ void start_pairs(float (&x)[SMma::accumulators], A a, B b, int columns) {
        ptx::wgmma_discard(x);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (columns + 15) / 16; ++i) Product::multiply(x, a.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_s() {
        const u32 stage = step.stage(cfg::q_stages);
        smem.q_full[stage].wait(step.parity(cfg::q_stages));
        start_pairs<SMma>(s, SmemDescriptor<QTile>::of_columns(smem.q).stage(stage), SmemDescriptor<KTile>::of_columns(&smem.k).rows_from(index * own_keys), cfg::head_dim);
    }
    __device__ void start_dp() {
        const u32 stage = step.stage(cfg::do_stages);
        smem.do_full[stage].wait(step.parity(cfg::do_stages));
        start_pairs<DpMma>(dp, SmemDescriptor<DoTile>::of_columns(smem.d_o).stage(stage), SmemDescriptor<VTile>::of_columns(&smem.v).rows_from(index * own_keys), cfg::head_dim_v);
    }
    // This warpgroup's 64 columns of Q or dO, transposed, by P or dS of all keys.
    template <class Product, class T>
    __device__ void start_sum(float (&x)[Product::accumulators], const T* tiles, u32 stage, const PairTile& pairs) {
        const SmemDescriptor<T> a = {SmemDescriptor<T>::of_rows(tiles).stage(stage).low + index * (T::panel_bytes / 16)};
        const SmemDescriptor<PairTile> b = SmemDescriptor<PairTile>::of_rows(&pairs);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) Product::multiply(x, a.rows(i), b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void start_dq() {
        const DqColumns columns(SmemDescriptor<KTile>::of_rows(&smem.k), index);
        ptx::wgmma_discard(dq);
        ptx::wgmma_fence();
        columns.multiply(dq, SmemDescriptor<PairTile>::of_columns(&smem.ds));
        ptx::wgmma_commit();
    }

    // Leaves what this warpgroup has of P or dS, as rows of 16-bit numbers: eight rows of a block of eight keys lie in different banks.
    __device__ void leave(PairTile& tile, const float (&x)[SMma::accumulators]) const {
        const u32 row = lane / 32 * 16 + lane % 32 / 4;
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 4) {
            const u32 block = index * (own_keys / 8) + i / 4;
            u32* const to = reinterpret_cast<u32*>(tile.data[block / 8] + row * 64 + (block % 8 ^ row % 8) * 8 + lane % 4 * 2);
            to[0] = Element::pack(x[i], x[i + 1]), to[8 * 32] = Element::pack(x[i + 2], x[i + 3]);
        }
        ptx::fence_async_smem();
        __syncwarp();
    }
    // From dot products to weights.
    template <class Kept>
    __device__ void weigh(float scale_log2, const Kept& kept) {
        const float* const lse_log2 = smem.lse_log2[step.stage(cfg::q_stages)] + lane / 32 * 16 + lane % 32 / 4;
        const float l[2] = {-lse_log2[0], -lse_log2[8]};
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) {
            const float exponent = __fmaf_rn(s[i], scale_log2, l[fragment_row(i)]);
            s[i] = ptx::exp2(kept(i) ? exponent : minus_inf);
        }
    }
    // From gradients of weights to those of dot products.
    __device__ void differentiate() {
        const float* const delta = smem.delta[step.stage(cfg::do_stages)] + lane / 32 * 16 + lane % 32 / 4;
        const float d[2] = {delta[0], delta[8]};
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) s[i] *= dp[i] - d[fragment_row(i)];
    }

    __device__ void tell_dq() {
        if (untold == 0) return;
        ptx::fence_async_smem();
        __syncwarp();
        arrive(smem.dq_full[untold - 1][0]);
        untold = 0;
    }
    __device__ void leave_dq() {
        const Step before = {step.count - 1};
        smem.dq_empty[before.stage()][0].wait(before.parity());
#pragma unroll
        for (int i = 0; i < DqColumns::accumulators; i += 4)
            DqColumns::place(smem.dq[0], index, i)[lane] = make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        untold = step.stage() + 1;
    }
    __device__ void do_step(const Rows& rows, const Walk& at, i32 key) {
        const WorkTile work = at.work_tile();
        const Score score(args, rows, work);
        start_s();
        start_dp();
        tell_dq();
        ptx::wgmma_wait<1>();
        if (at.is_full()) {
            weigh(score.scale_log2, EveryElement{});
        } else {
            const Mask mask(args, rows, work);
            weigh(score.scale_log2, kept_elements<SMma::accumulators>(mask, at.tile * cfg::tile_q + lane / 32 * 16 + lane % 32 / 4, key));
        }
        smem.p_empty.wait(step.parity(1) ^ 1);
        leave(smem.p, s);
        arrive(smem.p_full);
        smem.p_full.wait(step.parity(1));
        start_sum<DvMma>(dv, smem.d_o, step.stage(cfg::do_stages), smem.p);
        ptx::wgmma_wait<1>();
        differentiate();
        leave(smem.ds, s);
        arrive(smem.ds_full);
        smem.ds_full.wait(step.parity(1));
        start_dq();
        start_sum<DkMma>(dk, smem.q, step.stage(cfg::q_stages), smem.ds);
        ptx::wgmma_wait<2>();
        arrive(smem.p_empty);
        arrive(smem.do_empty[step.stage(cfg::do_stages)]);
        ptx::wgmma_wait<1>();
        leave_dq();
        ptx::wgmma_wait<0>();
        arrive(smem.q_empty[step.stage(cfg::q_stages)]);
        ++step.count;
    }

    // Rows of keys, of which this warpgroup has columns: each 8 x 8 block is transposed, and a lane of a quad writes 16 bytes of one of four.
    template <int n>
    __device__ void store_columns(unsigned char* to, i64 row_bytes, const KvWorkTile& work, i32 end, i32 columns, const float (&x)[n], float scale) const {
        const i32 first = index * 64 + lane / 32 * 16, key = work.kv_tile * cfg::tile_kv + i32(lane % 4) * 8 + lane % 32 / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int block = 0; block < n / 4; block += 4) {
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = (block + i) * 4 + half * 2;
                    words[i] = ptx::movmatrix_transposed(Element::pack(x[at] * scale, x[at + 1] * scale));
                }
                transpose_quad(words);
                const i32 row = key + block * 8, column = first + half * 8;
                if (row < end && column < columns)
                    *reinterpret_cast<uint4*>(to + row * row_bytes + column * sizeof(KvElement)) = make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
    __device__ void attend(const KvWorkTile& work) {
        const Rows rows(args, work.batch);
        const i32 key = work.kv_tile * cfg::tile_kv + i32(index) * own_keys + lane % 4 * 2;  // this thread's first
        Walk at(args, rows, work, smem.board, place_in_steps);
#pragma unroll
        for (float& x : dv) x = 0.f;
#pragma unroll
        for (float& x : dk) x = 0.f;
        if (at.more()) {
            smem.kv_full.wait(kv.parity);
            kv.advance();
#pragma unroll 1
            for (; at.more(); at.advance()) do_step(rows, at, key);
            tell_dq();
            arrive(smem.kv_empty);
        }
        const StridedOutput &to_dk = Group::dk(args), &to_dv = Group::dv(args);
        store_columns(to_dk.rows(rows.kv, work.kv_head), to_dk.row_bytes, work, rows.kv_len, cfg::head_dim, dk, args.scale * SMma::sign);
        store_columns(to_dv.rows(rows.kv, work.kv_head), to_dv.row_bytes, work, rows.kv_len, cfg::head_dim_v, dv, 1.f);
        __syncwarp();
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    Ring<2> ring;
    for (KvWorkTile work = next_work(smem, ring); !work.is_last(); work = next_work(smem, ring)) consumer.attend(work);
}

__device__ void init_barriers(Smem& smem) {
    constexpr u32 readers = 4 * cfg::consumers;
    smem.kv_full.init(1), smem.kv_empty.init(readers);
    smem.p_full.init(readers), smem.p_empty.init(readers), smem.ds_full.init(readers);
    for (int i = 0; i < 2; ++i) {
        smem.work_full[i].init(1), smem.work_empty[i].init(readers + writers);
        if (i < cfg::q_stages) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        if (i < cfg::do_stages) smem.do_full[i].init(1), smem.do_empty[i].init(readers);
        smem.dq_full[i][0].init(readers), smem.dq_empty[i][0].init(1), smem.dq_sum[i][0].init(1);
    }
    smem.board.init(readers + writers);
    ptx::fence_mbarrier_init();
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_bwd_columns(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.d_o.map);
        init_barriers(smem);
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x >= 128) return consume(args, smem);
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    const u32 warp = ptx::uniform(threadIdx.x / 32);
    if (warp == 0) KvProducer<Smem>{args, smem}.run();
    else if (warp <= writers) write(args, smem, warp - 1);
}
