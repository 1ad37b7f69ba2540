// dk and dv on Hopper with a bias of pairs that entries of the batch ("rows n") share. The formulas are attn_bwd.cu's.
//
// A block owns 64 keys for each of cfg::consumers warpgroups, of one head, for cfg::rows of the n, whose dk and dv stay in registers, and goes
// along the queries. A tile of the bias is brought once for these n. S and dP are transposed, a key in each row, so that P and dS are left
// operands from registers. A unit is one n and one tile of queries.
//
//   start dk of the unit before, S, dP | wait S (and that dk) | P, start dv | wait dP and dv | dS
//
//   barrier                        arrives                         waits             protects
//   kv_full[r]                     TMA (K and V of n r)            each consumer     smem.k, smem.v of n r until read
//   kv_empty[r]                    one lane per consumer warp      producer          the same until refilled
//   q_full[s], q_empty[s]: the same for a unit's Q, dO, lse and delta
//   bias_full[c], bias_empty[c]: the same for the bias tile of consumer c, whose four warps alone read it
//
// No block adds to what another one writes.

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DpMma, DvMma, DkMma, and the options Element, Keys
#include "ptx/bulk.cuh"
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/log_sum.cuh"
#include "tile/ring.cuh"
#include "tile/tile.cuh"
#include "tile/tma_tensor.cuh"
#include "tile/triangle_work.cuh"
#include "variant/interfaces_triangle.cuh"
#include "variant/statistics/by_rows.cuh"
#include "variant/store/rows.cuh"

using QTile = Tile<64, cfg::head_dim>;
using DoTile = Tile<64, cfg::head_dim_v>;
using KTile = Tile<64, cfg::head_dim>;
using VTile = Tile<64, cfg::head_dim_v>;

struct Smem {
    KTile k[cfg::rows * cfg::consumers];  // of n r and consumer c: r * cfg::consumers + c
    VTile v[cfg::rows * cfg::consumers];
    QTile q[cfg::stages];
    DoTile d_o[cfg::stages];
    PairTile bias[cfg::consumers];
    alignas(16) float lse_log2[cfg::stages][64], delta[cfg::stages][64];
    ptx::Mbarrier kv_full[cfg::rows], kv_empty[cfg::rows], q_full[cfg::stages], q_empty[cfg::stages];
    ptx::Mbarrier bias_full[cfg::consumers], bias_empty[cfg::consumers];
};
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct KeysOption<Keys>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true};

struct Producer {
    const Args& args;
    Smem& smem;
    Ring<cfg::stages> q{};
    u32 kv_parity = 1, bias_parity = 1;  // of the empty barriers

    __device__ void load_kv(const TriangleWork& work, int r) {
        smem.kv_empty[r].wait(kv_parity);
        smem.kv_full[r].arrive_expect(cfg::consumers * (KTile::bytes + VTile::bytes));
        for (int c = 0; c < cfg::consumers; ++c) {
            load_tile(args.k, smem.k[r * cfg::consumers + c], smem.kv_full[r], work.entry(r), work.begin + c * 64, work.head);
            load_tile(args.v, smem.v[r * cfg::consumers + c], smem.kv_full[r], work.entry(r), work.begin + c * 64, work.head);
        }
    }
    __device__ void load_bias(const TriangleWork& work, i32 tile) {
        const PairTile* tiles = reinterpret_cast<const PairTile*>(args.tiles);
        for (int c = 0; c < cfg::consumers; ++c) {
            smem.bias_empty[c].wait(bias_parity);
            smem.bias_full[c].arrive_expect(PairTile::bytes);
            ptx::bulk_load(smem.bias[c].data, tiles + work.tile(args, tile, work.begin / 64 + c), PairTile::bytes, smem.bias_full[c]);
        }
        bias_parity ^= 1;
    }
    __device__ void load_q(const TriangleWork& work, int r, i32 tile) {
        const i64 first = work.statistics(args, r) + tile * 64;
        ptx::Mbarrier& full = smem.q_full[q.stage];
        smem.q_empty[q.stage].wait(q.parity ^ 1);
        full.arrive_expect(QTile::bytes + DoTile::bytes + sizeof(smem.lse_log2[0]) + sizeof(smem.delta[0]));
        load_tile(args.q, smem.q[q.stage], full, work.entry(r), tile * 64, work.head);
        load_tile(args.d_o, smem.d_o[q.stage], full, work.entry(r), tile * 64, work.head);
        ptx::bulk_load(smem.lse_log2[q.stage], args.lse_log2 + first, sizeof(smem.lse_log2[0]), full);
        ptx::bulk_load(smem.delta[q.stage], args.delta + first, sizeof(smem.delta[0]), full);
        q.advance();
    }
};

__device__ void produce(const Args& args, Smem& smem) {
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x != 0) return;
    Producer producer{args, smem};
    const i32 tiles = PairTile::count(args.q_len);
    for (TriangleWorks works(args, args.kv_len, 64 * cfg::consumers, cfg::rows); works.more(); works.next(), producer.kv_parity ^= 1) {
        const TriangleWork work = works.at();
        for (i32 tile = 0; tile < tiles; ++tile) {
            for (int r = 0; r < cfg::rows; ++r) {
                if (tile == 0) producer.load_kv(work, r);
                if (r == 0) producer.load_bias(work, tile);
                producer.load_q(work, r, tile);
            }
        }
    }
}

struct Consumer {
    static constexpr int rows = cfg::rows;
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    const SmemDescriptor<KTile> k_rows;
    const SmemDescriptor<VTile> v_rows;
    const SmemDescriptor<QTile> q_columns, q_rows;
    const SmemDescriptor<DoTile> do_columns, do_rows;
    const float scale_log2;
    const i32 tiles;
    Ring<cfg::stages> q{};
    u32 kv_parity = 0, bias_parity = 0;
    float s[SMma::accumulators], dp[SMma::accumulators], bias[PairTile::each];
    float dk[rows][DkMma::accumulators], dv[rows][DvMma::accumulators];
    u32 p[SMma::accumulators / 2];  // P, then dS in its place

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          k_rows(SmemDescriptor<KTile>::of_columns(smem.k).stage(index)), v_rows(SmemDescriptor<VTile>::of_columns(smem.v).stage(index)),
          q_columns(SmemDescriptor<QTile>::of_columns(smem.q)), q_rows(SmemDescriptor<QTile>::of_rows(smem.q)),
          do_columns(SmemDescriptor<DoTile>::of_columns(smem.d_o)), do_rows(SmemDescriptor<DoTile>::of_rows(smem.d_o)),
          scale_log2(args.scale * float(log2_e)), tiles(PairTile::count(args.q_len)) {}

    // Said by each warp when it has read a stage.
    __device__ void release(ptx::Mbarrier& empty) const {
        if (lane % 32 == 0) empty.arrive();
    }

    __device__ void start_s_and_dp(int r, i32 tile) {
        const SmemDescriptor<KTile> k = k_rows.stage(r * cfg::consumers);
        const SmemDescriptor<VTile> v = v_rows.stage(r * cfg::consumers);
        const SmemDescriptor<QTile> b = q_columns.stage(q.stage);
        const SmemDescriptor<DoTile> d_o = do_columns.stage(q.stage);
        if (tile == 0) smem.kv_full[r].wait(kv_parity);
        smem.q_full[q.stage].wait(q.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) SMma::multiply(s, k.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i) DpMma::multiply(dp, v.columns(i), d_o.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dv(int r) {
        const SmemDescriptor<DoTile> b = do_rows.stage(q.stage);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < SMma::accumulators / 8; ++i) DvMma::multiply(dv[r], p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void start_dk(int r, u32 stage) {
        const SmemDescriptor<QTile> b = q_rows.stage(stage);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < SMma::accumulators / 8; ++i) DkMma::multiply(dk[r], p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void take_bias() {
        smem.bias_full[index].wait(bias_parity), bias_parity ^= 1;
        smem.bias[index].get(bias, lane);
    }
    // Where its numbers have come, as dv is a product of weights made of all of them: the copy of the next tile may overtake loads.
    __device__ void release_bias() const {
        __syncwarp();
        release(smem.bias_empty[index]);
    }

    // S, dP, dv and dS of a unit; where it is `later`, dk of the unit before, of n `before`, runs beside them.
    template <bool later>
    __device__ void step(int r, int before, i32 tile, Keys::Word word) {
        const u32 stage = q.stage;
        if constexpr (later) {
            start_dk(before, stage);
            q.advance();
        }
        start_s_and_dp(r, tile);
        if (r == 0) take_bias();
        ptx::wgmma_wait<1>();
        if constexpr (later) release(smem.q_empty[stage]);
        StatisticsByRows lse_log2(smem.lse_log2[q.stage], lane), delta(smem.delta[q.stage], lane);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) s[i] = __fmaf_rn(s[i], scale_log2, bias[i]);
        Keys::apply_transposed(word, s);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 2) {
            const float2 lse = lse_log2(i);
            s[i] = ptx::exp2(s[i] - lse.x), s[i + 1] = ptx::exp2(s[i + 1] - lse.y);
            p[i / 2] = Element::pack(s[i], s[i + 1]);
        }
        start_dv(r);
        if (r == 0) release_bias();
        ptx::wgmma_wait<0>();
        if (tile == tiles - 1) release(smem.kv_empty[r]);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 2) {
            const float2 d = delta(i);
            p[i / 2] = Element::pack(s[i] * (dp[i] - d.x), s[i + 1] * (dp[i + 1] - d.y));
        }
    }

    __device__ void attend(const TriangleWork& work) {
        Keys::Word words[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            words[r] = Keys::word(args, work.entry(r).index, min(work.begin / 64 + i32(index), PairTile::count(args.kv_len) - 1));
#pragma unroll
            for (float& x : dk[r]) x = 0.f;
#pragma unroll
            for (float& x : dv[r]) x = 0.f;
        }
        step<false>(0, 0, 0, words[0]);
#pragma unroll 1
        for (i32 next = 1;; ++next) {
#pragma unroll
            for (int r = 1; r < rows; ++r) step<true>(r, r - 1, next - 1, words[r]);
            if (next == tiles) break;
            step<true>(0, rows - 1, next, words[0]);
        }
        kv_parity ^= 1;
        start_dk(rows - 1, q.stage);
        ptx::wgmma_wait<0>();
        release(smem.q_empty[q.stage]);
        q.advance();
        store(work);
    }
    __device__ void store(const TriangleWork& work) const {
        const i32 row = work.begin + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            if (!work.has(r)) continue;
            store_rows(args.dk.rows(work.entry(r), work.head), args.dk.row_bytes, row, args.kv_len, cfg::head_dim, dk[r], args.scale);
            store_rows(args.dv.rows(work.entry(r), work.head), args.dv.row_bytes, row, args.kv_len, cfg::head_dim_v, dv[r], 1.f);
        }
        __syncwarp();
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    for (TriangleWorks works(args, args.kv_len, 64 * cfg::consumers, cfg::rows); works.more(); works.next()) consumer.attend(works.at());
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_bwd_triangle_dkdv(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        constexpr u32 readers = 4 * cfg::consumers;
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.d_o.map);
        for (int i = 0; i < cfg::rows; ++i) smem.kv_full[i].init(1), smem.kv_empty[i].init(readers);
        for (int i = 0; i < cfg::stages; ++i) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        for (int i = 0; i < cfg::consumers; ++i) smem.bias_full[i].init(1), smem.bias_empty[i].init(4);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x < 128) produce(args, smem);
    else consume(args, smem);
}
