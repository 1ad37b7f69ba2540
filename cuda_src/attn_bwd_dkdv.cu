// dk and dv alone on Hopper, for head sizes above 128: the first kernel of a pair, keys stationary. The formulas are attn_bwd.cu's.
//
// A block owns 64 keys of one head of k and v, and goes over the query tiles that keep any of them, for each query head of the
// group. Both accumulators of a key would not fit into the registers of one warpgroup, so the two of them have roles: `values`
// computes S and P, and dv += P' dO; `keys` computes dP, dS with the other's P, and dk += dS' Q. S and dP are transposed (a row is
// a key): P' and dS' stay in registers as left operands. P times the score's derivative goes over packed, a thread's words to the
// same thread of the other warpgroup: four stores and four loads of 16 bytes. Nothing is added across blocks.
//
//   values:  start dv of the step before, S  | wait both          | P
//   keys:    start dk of the step before, dP | wait both | wait P | dS
//
//   barrier            arrives                                   waits            protects
//   work_full[i]       lane 0 of the producer                    each consumer    smem.work[i] until read
//   work_empty[i]      one lane per consumer warp                producer         the same until written again
//   kv_full            TMA (K, V)                                each consumer    smem.k, smem.v until read
//   kv_empty           one lane per consumer warp                producer         the same until refilled
//   q_full[s]          TMA (Q, lse)                              each consumer    smem.q[s], smem.lse_log2[s] until read
//   q_empty[s]         one lane per consumer warp: S, dk done    producer         the same until refilled
//   do_full[s], do_empty[s]: the same for dO and delta: dv, dP done
//   p_full[s]          one lane per warp of values               keys             smem.p[s] until read
//   p_empty[s]         one lane per warp of keys                 values           the same until written again

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DpMma, DvMma, DkMma, and the choices
                       // Element, Rows, Mask, Score, Weight, Statistics, Group, DkvRows, Scheduler, Walk
#include "tile/facts.cuh"
#include "tile/tile.cuh"
#include "variant/group/interface.cuh"
#include "variant/kv_producer.cuh"
#include "variant/store/rows.cuh"

using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Tile<cfg::tile_kv, cfg::head_dim_v>;
using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using DoTile = Tile<cfg::tile_q, cfg::head_dim_v>;

struct Smem {
    KTile k;
    VTile v;
    QTile q[2];
    DoTile d_o[2];
    uint4 p[2][SMma::accumulators / 8][128];
    alignas(128) float lse_log2[2][cfg::tile_q];
    alignas(128) float delta[2][cfg::tile_q];
    ptx::Mbarrier work_full[2], work_empty[2], kv_full, kv_empty;
    ptx::Mbarrier q_full[2], q_empty[2], do_full[2], do_empty[2], p_full[2], p_empty[2];
    KvWorkTile work[2];
    Walk::Board board;
};

static_assert(cfg::tile_kv == 64 && cfg::tile_q % 16 == 0);
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct NumberOption<Element>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct KvSchedulerOption<Scheduler>;
template struct GroupOption<Group>;
template struct RowsStoreOption<DkvRows>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 384, true};

// This is what both roles have: products of 64 keys by a tile of queries, and the accumulator of one gradient.
template <class Mma>
struct Role {
    const Args& args;
    Smem& smem;
    const u32 lane = threadIdx.x % 128;
    Step step{};
    Ring<1> kv{};
    Walk::Place place_in_steps{};
    float s[SMma::accumulators], sum[Mma::accumulators];
    u32 p[SMma::accumulators / 2];

    __device__ Role(const Args& args, Smem& smem) : args(args), smem(smem) {}

    // Said by each warp when it has read, or written.
    __device__ void arrive(ptx::Mbarrier& barrier) const {
        if (lane % 32 == 0) barrier.arrive();
    }
    template <class Product, class A, class B>
    __device__ void start(A a, B b, int columns) {
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (columns + 15) / 16; ++i) Product::multiply(s, a.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    template <class B>
    __device__ void start_sum(B b) {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) Mma::multiply(sum, p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
};

struct Values : Role<DvMma> {
    using Role::Role;

    __device__ void pass_p() {
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 8) {
            u32 w[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) w[j] = Element::pack(s[i + 2 * j], s[i + 2 * j + 1]);
            smem.p[step.stage()][i / 8][lane] = make_uint4(w[0], w[1], w[2], w[3]);
        }
        __syncwarp();
        arrive(smem.p_full[step.stage()]);
    }
    // Where `later`, dv of the step before runs beside S.
    template <bool later>
    __device__ void do_step(const Rows& rows, const Walk& at, i32 key) {
        const u32 before = step.stage();
        if (later) {
            start_dv();
            ++step.count;
        }
        const u32 stage = step.stage();
        smem.q_full[stage].wait(step.parity());
        const SmemDescriptor<QTile> q = SmemDescriptor<QTile>::of_columns(smem.q).stage(stage);
        start<SMma>(SmemDescriptor<KTile>::of_columns(&smem.k), q, cfg::head_dim);
        const WorkTile own = at.work_tile();
        const i32 q_first = own.q_begin + lane % 4 * 2;
        const auto weights = Weight(args, rows, own).template kept<SMma::accumulators / 8, 1>(q_first, key);
        smem.p_empty[stage].wait(step.parity() ^ 1);
        ptx::wgmma_wait<0>();
        if (later) arrive(smem.do_empty[before]);
        const Mask mask(args, rows, own);
        const Score score(args, rows, own);
        const Statistics lse_log2(smem.lse_log2[stage], lane);
        const LogitsTransposed<Score> logits = {score, q_first, key};
        if (at.is_full()) weigh_transposed<PackedAtOnce>(s, p, score, logits, weights, EveryElement{}, lse_log2, q_first, key);
        else weigh_transposed<PackedAtOnce>(s, p, score, logits, weights, kept_transposed<SMma::accumulators>(mask, q_first, key), lse_log2, q_first, key);
        pass_p();
        arrive(smem.q_empty[stage]);
    }
    __device__ void start_dv() {
        smem.do_full[step.stage()].wait(step.parity());
        start_sum(SmemDescriptor<DoTile>::of_rows(smem.d_o).stage(step.stage()));
    }
    __device__ void finish() {
        start_dv();
        ptx::wgmma_wait<0>();
        arrive(smem.do_empty[step.stage()]);
    }
    __device__ void store(const KvWorkTile& work, const Rows& rows, i32 key) const {
        const StridedOutput& to = Group::dv(args);
        DkvRows::store(to.rows(rows.kv, work.kv_head), to.row_bytes, key, rows.kv_len, cfg::head_dim_v, sum, Weight::factor(args));
    }
};

struct Keys : Role<DkMma> {
    using Role::Role;

    // p = ds, of the other role's weights and this one's dp.
    template <class Weights>
    __device__ void differentiate(const Weights& weights) {
        const float factor = Weight::factor(args);
        const float* delta = smem.delta[step.stage()] + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 8) {
            const uint4 words = smem.p[step.stage()][i / 8][lane];
            const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const float2 d = *reinterpret_cast<const float2*>(delta + fragment_column(i + j));
                const float low = weights(s[i + j], i / 8, j) * factor - d.x, high = weights(s[i + j + 1], i / 8, j + 1) * factor - d.y;
                const float w0 = Element::widen({u16(w[j / 2])}), w1 = Element::widen({u16(w[j / 2] >> 16)});
                p[(i + j) / 2] = Element::pack(w0 * low, w1 * high);
            }
        }
    }
    // Where `later`, dk of the step before runs beside dP.
    template <bool later>
    __device__ void do_step(const Rows& rows, const Walk& at, i32 key) {
        const u32 before = step.stage();
        if (later) {
            start_dk();
            ++step.count;
        }
        const u32 stage = step.stage();
        smem.do_full[stage].wait(step.parity());
        const SmemDescriptor<DoTile> d_o = SmemDescriptor<DoTile>::of_columns(smem.d_o).stage(stage);
        start<DpMma>(SmemDescriptor<VTile>::of_columns(&smem.v), d_o, cfg::head_dim_v);
        const i32 q_first = at.tile * cfg::tile_q + lane % 4 * 2;
        const auto weights = Weight(args, rows, at.work_tile()).template kept<SMma::accumulators / 8, 1>(q_first, key);
        smem.p_full[stage].wait(step.parity());
        ptx::wgmma_wait<0>();
        if (later) arrive(smem.q_empty[before]);
        differentiate(weights);
        ptx::fence_async_smem();  // delta may still be on its way, and the barrier alone does not hold TMA back
        __syncwarp();
        arrive(smem.do_empty[stage]);
        arrive(smem.p_empty[stage]);
    }
    __device__ void start_dk() {
        smem.q_full[step.stage()].wait(step.parity());
        start_sum(SmemDescriptor<QTile>::of_rows(smem.q).stage(step.stage()));
    }
    __device__ void finish() {
        start_dk();
        ptx::wgmma_wait<0>();
        arrive(smem.q_empty[step.stage()]);
    }
    __device__ void store(const KvWorkTile& work, const Rows& rows, i32 key) const {
        const float scale = args.scale * SMma::sign;
        const StridedOutput& to = Group::dk(args);
        DkvRows::store(to.rows(rows.kv, work.kv_head), to.row_bytes, key, rows.kv_len, cfg::head_dim, sum, scale);
    }
};

template <class R>
__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    R role(args, smem);
    Ring<2> ring;
    for (KvWorkTile work = next_work(smem, ring); !work.is_last(); work = next_work(smem, ring)) {
        const Rows rows(args, work.batch);
        const i32 key = work.kv_tile * cfg::tile_kv + role.lane / 32 * 16 + role.lane % 32 / 4;  // this thread's upmost
#pragma unroll
        for (float& x : role.sum) x = 0.f;
        Walk at(args, rows, work, smem.board, role.place_in_steps);
        if (at.more()) {
            smem.kv_full.wait(role.kv.parity);
            role.kv.advance();
            role.template do_step<false>(rows, at, key);
            for (at.advance(); at.more(); at.advance()) role.template do_step<true>(rows, at, key);
            role.finish();
            ++role.step.count;
            role.arrive(smem.kv_empty);
        }
        role.store(work, rows, key);
        __syncwarp();
    }
}

__device__ void init_barriers(Smem& smem) {
    smem.kv_full.init(1), smem.kv_empty.init(8);
    for (int i = 0; i < 2; ++i) {
        smem.work_full[i].init(1), smem.work_empty[i].init(8);
        smem.q_full[i].init(1), smem.q_empty[i].init(8), smem.do_full[i].init(1), smem.do_empty[i].init(8);
        smem.p_full[i].init(4), smem.p_empty[i].init(4);
    }
    smem.board.init(8);
    ptx::fence_mbarrier_init();
}

extern "C" __global__ __launch_bounds__(384, 1) void attn_bwd_dkdv(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.d_o.map);
        init_barriers(smem);
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    const u32 warpgroup = ptx::uniform(threadIdx.x / 128);
    if (warpgroup == 1) return consume<Values>(args, smem);
    if (warpgroup == 2) return consume<Keys>(args, smem);
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x < 32) KvProducer<Smem>{args, smem}.run();
}
