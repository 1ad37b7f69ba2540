// dq alone on Hopper, for head sizes above 128: the second kernel of a pair, queries stationary. The formulas are attn_bwd.cu's.
//
// A block owns cfg::tile_q query rows of one head, 64 of them each of cfg::consumers warpgroups, and goes over the key tiles that
// they keep, as the forward does. S and dP have a query in each row, so dS stays in registers, the left operand of dq += dS K.
//
//   start dq of the tile before, S, dP | wait S (and that dq) | P | wait dP | dS
//
//   barrier            arrives                         waits             protects
//   work_full[i]       lane 0 of the producer          each consumer     smem.work[i] until read
//   work_empty[i]      one lane per consumer warp      producer          the same until written again
//   q_full             TMA (Q and dO)                  each consumer     smem.q, smem.d_o until read
//   q_empty            one lane per consumer warp      producer          the same until refilled
//   k_full[s], k_empty[s], v_full, v_empty: the same for a tile of K (two stages) and of V (one)

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DpMma, DqMma, and the choices
                       // Element, Rows, Mask, Score, Weight, Scheduler, Walk
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/range.cuh"
#include "tile/ring.cuh"
#include "tile/tile.cuh"
#include "tile/tma_tensor.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/store/rows.cuh"

using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using DoTile = Tile<cfg::tile_q, cfg::head_dim_v>;
using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using VTile = Tile<cfg::tile_kv, cfg::head_dim_v>;

struct Smem {
    QTile q;
    DoTile d_o;
    KTile k[2];
    VTile v;
    ptx::Mbarrier work_full[2], work_empty[2], q_full, q_empty, k_full[2], k_empty[2], v_full, v_empty;
    WorkTile work[2];
    Walk::Board board;  // of stage s of K and of work i, as these are
};
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct SchedulerOption<Scheduler>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true};

struct Producer {
    const Args& args;
    Smem& smem;
    Ring<1> q{}, v{};
    Ring<2> k{};

    // One lane.
    __device__ void load_q(const Rows& rows, const WorkTile& work) {
        smem.q_empty.wait(q.parity ^ 1);
        q.advance();
        smem.q_full.arrive_expect(QTile::bytes + DoTile::bytes);
        load_tile(args.q, smem.q, smem.q_full, rows.q, work.q_begin, work.head);
        load_tile(args.d_o, smem.d_o, smem.q_full, rows.q, work.q_begin, work.head);
    }
    __device__ void await_k() const { smem.k_empty[k.stage].wait(k.parity ^ 1); }
    __device__ void load_kv(const Rows& rows, const WorkTile& work, i32 tile) {
        const i32 kv_head = work.head / args.heads_per_kv;
        smem.k_full[k.stage].arrive_expect(KTile::bytes);
        load_tile(args.k, smem.k[k.stage], smem.k_full[k.stage], rows.kv, tile * cfg::tile_kv, kv_head);
        smem.v_empty.wait(v.parity ^ 1);
        smem.v_full.arrive_expect(VTile::bytes);
        load_tile(args.v, smem.v, smem.v_full, rows.kv, tile * cfg::tile_kv, kv_head);
        k.advance(), v.advance();
    }
};

__device__ void produce(const Args& args, Smem& smem) {
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x >= 32) return;
    Producer producer{args, smem};
    Walk::produce(producer);
}

// This is what a consumer has for one work.
struct Work {
    const Rows rows;
    const Mask mask;
    const Score score;
    const Weight weight;
    const i32 row;  // this thread's upmost

    __device__ Work(const Args& args, const WorkTile& tile, i32 row)
        : rows(args, tile.batch), mask(args, rows, tile), score(args, rows, tile), weight(args, rows, tile), row(row) {}
};

struct Consumer {
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    const SmemDescriptor<QTile> q_rows;
    const SmemDescriptor<DoTile> do_rows;
    const SmemDescriptor<KTile> k_columns, k_rows;
    const SmemDescriptor<VTile> v_columns;
    Ring<1> q{}, v{};
    Ring<2> k{};
    float lse_log2[2], delta[2];  // of this thread's rows
    float s[SMma::accumulators], dp[SMma::accumulators], dq[DqMma::accumulators];
    u32 ds[SMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          q_rows(SmemDescriptor<QTile>::of_columns(&smem.q).rows_from(index * 64)),
          do_rows(SmemDescriptor<DoTile>::of_columns(&smem.d_o).rows_from(index * 64)),
          k_columns(SmemDescriptor<KTile>::of_columns(smem.k)),
          k_rows(SmemDescriptor<KTile>::of_rows(smem.k)), v_columns(SmemDescriptor<VTile>::of_columns(&smem.v)) {}

    // Said by each warp when it has read a stage.
    __device__ void release(ptx::Mbarrier& empty) const {
        if (lane % 32 == 0) empty.arrive();
    }

    __device__ void start_s() {
        const SmemDescriptor<KTile> b = k_columns.stage(k.stage);
        smem.k_full[k.stage].wait(k.parity);
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) SMma::multiply(s, q_rows.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dp() {
        smem.v_full.wait(v.parity);
        ptx::wgmma_discard(dp);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i) DpMma::multiply(dp, do_rows.columns(i), v_columns.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dq(u32 stage) {
        const SmemDescriptor<KTile> b = k_rows.stage(stage);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_kv / 16; ++i) DqMma::multiply(dq, ds + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }

    // From dot products to weights times the score's derivative.
    template <class Kept>
    __device__ void weigh(const Kept& kept, const Score& score, i32 row, i32 first) {
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) {
            const int r = fragment_row(i), c = fragment_column(i);
            const float t = score(s[i], row + 8 * r, first + c), exponent = __fmaf_rn(t, score.scale_log2, -lse_log2[r]);
            s[i] = ptx::exp2(kept(i) ? exponent : minus_inf) * score.derivative(s[i], row + 8 * r, first + c);
        }
    }
    template <class Weights>
    __device__ void differentiate(const Weights& weights) {
        const float factor = Weight::factor(args);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 2) {
            const float d = delta[fragment_row(i)];
            const float x = weights(dp[i], i / 8, i % 8) * factor - d, y = weights(dp[i + 1], i / 8, i % 8 + 1) * factor - d;
            ds[i / 2] = Element::pack(s[i] * x, s[i + 1] * y);
        }
    }
    // S and dP of the tile at hand, and dS; where `later`, dq of the tile before runs beside them. `arrive` says which tile it is, once
    // its K is there.
    template <bool later, class Arrive>
    __device__ void step(const Work& work, Arrive arrive) {
        const u32 before = k.stage;
        if (later) {
            start_dq(before);
            k.advance(), v.advance();
        }
        start_s();
        start_dp();
        const KeyTile tile = arrive();
        const i32 first = tile.index * cfg::tile_kv + lane % 4 * 2;
        const auto weights = work.weight.template kept<1, SMma::accumulators / 8, false>(work.row, first);
        ptx::wgmma_wait<1>();
        if (later) release(smem.k_empty[before]);
        if (tile.full) weigh(EveryElement{}, work.score, work.row, first);
        else weigh(kept_elements<SMma::accumulators>(work.mask, work.row, first), work.score, work.row, first);
        ptx::wgmma_wait<0>();
        release(smem.v_empty);
        differentiate(weights);
    }
    __device__ void begin(const Work& work, const WorkTile& tile) {
        load_statistics(work.rows, tile, work.row);
        smem.q_full.wait(q.parity);
        q.advance();
    }
    __device__ void finish() {
        release(smem.q_empty);
        start_dq(k.stage);
        ptx::wgmma_wait<0>();
        release(smem.k_empty[k.stage]);
        k.advance(), v.advance();
    }

    __device__ void attend(Walk walk, const WorkTile& tile) {
        const Work work(args, tile, tile.q_begin + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4);
#pragma unroll
        for (float& x : dq) x = 0.f;
        walk.visit(*this, work, tile);
        store_rows(args.dq.rows(work.rows.q, tile.head), args.dq.row_bytes, work.row, work.rows.q_len, cfg::head_dim, dq, args.scale * SMma::sign);
        __syncwarp();
    }
    __device__ void load_statistics(const Rows& rows, const WorkTile& work, i32 row) {
        const i64 first = i64(place_of(args, rows, work.head, 0)) * cfg::tile_q;
#pragma unroll
        for (int r = 0; r < 2; ++r) lse_log2[r] = args.lse_log2[first + row + 8 * r], delta[r] = args.delta[first + row + 8 * r];
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    Ring<2> ring;
    while (true) {
        smem.work_full[ring.stage].wait(ring.parity);
        const WorkTile& slot = smem.work[ring.stage];
        const WorkTile work = {i32(ptx::uniform(slot.batch)), i32(ptx::uniform(slot.head)), i32(ptx::uniform(slot.q_begin)), 0};
        const Walk walk(smem, ring.stage);
        __syncwarp();
        consumer.release(smem.work_empty[ring.stage]);
        ring.advance();
        if (work.is_last()) return;
        consumer.attend(walk, work);
    }
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_bwd_dq(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        constexpr u32 readers = 4 * cfg::consumers;
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.d_o.map);
        smem.q_full.init(1), smem.q_empty.init(readers), smem.v_full.init(1), smem.v_empty.init(readers);
        for (int i = 0; i < 2; ++i) {
            smem.work_full[i].init(1), smem.work_empty[i].init(readers);
            smem.k_full[i].init(1), smem.k_empty[i].init(readers);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x < 128) produce(args, smem);
    else consume(args, smem);
}
