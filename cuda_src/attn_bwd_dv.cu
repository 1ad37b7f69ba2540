// dv alone on Hopper, where attn_bwd.cu leaves it out (variant/dv/elsewhere.cuh). The formulas are attn_bwd.cu's.
//
// A block owns cfg::tile_kv keys of one head of k and v, 64 of them each of cfg::consumers warpgroups, and goes over the query tiles that
// keep any of them, for each query head of the group. S is transposed (a row is a key): P' stays in registers, the left operand of
// dv += P' dO. Warpgroups share what is loaded, and nothing else, so that one's products run beside another's exponentials.
//
//   start S | wait S | P | start dv | wait dv
//
//   barrier            arrives                                   waits            protects
//   work_full[i]       lane 0 of the producer                    each consumer    smem.work[i] until read
//   work_empty[i]      one lane per consumer warp                producer         the same until written again
//   kv_full            TMA (K)                                   each consumer    smem.k until read
//   kv_empty           one lane per consumer warp                producer         the same until refilled
//   q_full[s]          TMA (Q, lse)                              each consumer    smem.q[s], smem.lse_log2[s] until read
//   q_empty[s]         one lane per consumer warp: P done        producer         the same until refilled
//   do_full[s], do_empty[s]: the same for dO: dv done

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DvMma, and the choices
                       // Element, Rows, Mask, Score, Weight, Statistics, Group, DkvRows, Scheduler, Walk
#include "tile/facts.cuh"
#include "tile/tile.cuh"
#include "variant/group/interface.cuh"
#include "variant/kv_producer.cuh"
#include "variant/store/rows.cuh"

using KTile = Tile<cfg::tile_kv, cfg::head_dim>;
using QTile = Tile<cfg::tile_q, cfg::head_dim>;
using DoTile = Tile<cfg::tile_q, cfg::head_dim_v>;

struct Smem {
    KTile k;
    QTile q[2];
    DoTile d_o[2];
    alignas(128) float lse_log2[2][cfg::tile_q];
    ptx::Mbarrier work_full[2], work_empty[2], kv_full, kv_empty, q_full[2], q_empty[2], do_full[2], do_empty[2];
    KvWorkTile work[2];
    Walk::Board board;
};

static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
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

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true};

struct Consumer {
    const Args& args;
    Smem& smem;
    const u32 index = ptx::uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 128;  // of this warpgroup, of this thread in it
    Step step{};
    Ring<1> kv{};
    Walk::Place place_in_steps{};
    float s[SMma::accumulators], dv[DvMma::accumulators];
    u32 p[SMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem) : args(args), smem(smem) {}

    // Said by each warp when it has read.
    __device__ void arrive(ptx::Mbarrier& barrier) const {
        if (lane % 32 == 0) barrier.arrive();
    }
    __device__ void start_s() {
        const SmemDescriptor<KTile> a = SmemDescriptor<KTile>::of_columns(&smem.k).rows_from(index * 64);
        const SmemDescriptor<QTile> b = SmemDescriptor<QTile>::of_columns(smem.q).stage(step.stage());
        smem.q_full[step.stage()].wait(step.parity());
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) SMma::multiply(s, a.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dv() {
        const SmemDescriptor<DoTile> b = SmemDescriptor<DoTile>::of_rows(smem.d_o).stage(step.stage());
        smem.do_full[step.stage()].wait(step.parity());
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) DvMma::multiply(dv, p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void do_step(const Rows& rows, const Walk& at, i32 key) {
        start_s();
        const WorkTile own = at.work_tile();
        const Mask mask(args, rows, own);
        const Score score(args, rows, own);
        const i32 q_first = own.q_begin + lane % 4 * 2;
        const auto weights = Weight(args, rows, own).template kept<SMma::accumulators / 8, 1>(q_first, key);
        const Statistics lse_log2(smem.lse_log2[step.stage()], lane);
        const LogitsTransposed<Score> logits = {score, q_first, key};
        ptx::wgmma_wait<0>();
        if (at.is_full()) weigh_transposed<PackedAtOnce>(s, p, score, logits, weights, EveryElement{}, lse_log2, q_first, key);
        else weigh_transposed<PackedAtOnce>(s, p, score, logits, weights, kept_transposed<SMma::accumulators>(mask, q_first, key), lse_log2, q_first, key);
        __syncwarp();
        arrive(smem.q_empty[step.stage()]);
        start_dv();
        ptx::wgmma_wait<0>();
        arrive(smem.do_empty[step.stage()]);
        ++step.count;
    }
    __device__ void attend(const KvWorkTile& work) {
        const Rows rows(args, work.batch);
        const i32 key = work.kv_tile * cfg::tile_kv + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4;  // this thread's upmost
#pragma unroll
        for (float& x : dv) x = 0.f;
        Walk at(args, rows, work, smem.board, place_in_steps);
        if (at.more()) {
            smem.kv_full.wait(kv.parity);
            kv.advance();
            for (; at.more(); at.advance()) do_step(rows, at, key);
            arrive(smem.kv_empty);
        }
        const StridedOutput& to = Group::dv(args);
        DkvRows::store(to.rows(rows.kv, work.kv_head), to.row_bytes, key, rows.kv_len, cfg::head_dim_v, dv, Weight::factor(args));
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
    for (int i = 0; i < 2; ++i) {
        smem.work_full[i].init(1), smem.work_empty[i].init(readers);
        smem.q_full[i].init(1), smem.q_empty[i].init(readers), smem.do_full[i].init(1), smem.do_empty[i].init(readers);
    }
    smem.board.init(readers);
    ptx::fence_mbarrier_init();
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_bwd_dv(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.d_o.map);
        init_barriers(smem);
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x >= 128) return consume(args, smem);
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x < 32) KvProducer<Smem>{args, smem}.run();
}
