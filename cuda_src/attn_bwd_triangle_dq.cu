// dq, and the gradient of a bias of pairs that entries of the batch share, on Hopper: dS = P (dP - delta), dq = scale dS K, dbias = sum of dS
// over the entries ("rows n"). The formulas are attn_bwd.cu's.
//
// A block owns 64 queries for each of cfg::consumers warpgroups, of one head, and goes along the keys for cfg::rows of the n, then for the
// next ones. dq of these n and the sum of their dS over a tile of keys stay in registers. A tile's sum is then added to one in global memory
// that no other block adds to: in one order, so that it always has the same bits. A unit is one n and one tile of keys.
//
//   start dq of the unit before, S | wait both | start dP, P | wait dP | dS, sum | after the last n: add the sum
//
//   barrier                        arrives                         waits             protects
//   q_full[r]                      TMA (Q, dO, lse, delta of n r)  each consumer     smem.q, .d_o, .lse_log2, .delta of n r until read
//   q_empty[r]                     one lane per consumer warp      producer          the same until refilled
//   kv_full[s], kv_empty[s]: the same for a unit's K and V
//   bias_full[c], bias_empty[c]: the same for the bias tile of consumer c, whose four warps alone read it
//
// N may be cut in parts, whose sums pair_sums.cu adds in order.

#include "config.cuh"  // rendered: cfg, TmaTensor, StridedOutput, Args, SMma, DpMma, DqMma, and the options
                       // Element, Keys, PairSum
#include "ptx/bulk.cuh"
#include "tile/facts.cuh"
#include "tile/fragment.cuh"
#include "tile/log_sum.cuh"
#include "tile/ring.cuh"
#include "tile/tile.cuh"
#include "tile/tma_tensor.cuh"
#include "tile/triangle_work.cuh"
#include "variant/interfaces_triangle.cuh"
#include "variant/store/rows.cuh"

using QTile = Tile<64, cfg::head_dim>;
using DoTile = Tile<64, cfg::head_dim_v>;
using KTile = Tile<64, cfg::head_dim>;
using VTile = Tile<64, cfg::head_dim_v>;

struct Smem {
    QTile q[cfg::rows * cfg::consumers];  // of n r and consumer c: r * cfg::consumers + c
    DoTile d_o[cfg::rows * cfg::consumers];
    KTile k[cfg::stages];
    VTile v[cfg::stages];
    PairTile bias[cfg::consumers];
    alignas(16) float lse_log2[cfg::rows * cfg::consumers][64], delta[cfg::rows * cfg::consumers][64];
    ptx::Mbarrier q_full[cfg::rows], q_empty[cfg::rows], kv_full[cfg::stages], kv_empty[cfg::stages];
    ptx::Mbarrier bias_full[cfg::consumers], bias_empty[cfg::consumers];
};
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct KeysOption<Keys>;
template struct PairSumOption<PairSum>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true};

// The part of a work that is computed at once: cfg::rows of its n.
__device__ TriangleWork some_of(const TriangleWork& work, i32 n) {
    TriangleWork some = work;
    some.n_begin = n;
    return some;
}

struct Producer {
    const Args& args;
    Smem& smem;
    Ring<cfg::stages> kv{};
    u32 q_parity = 1, bias_parity = 1;  // of the empty barriers

    __device__ void load_q(const TriangleWork& work, int r) {
        smem.q_empty[r].wait(q_parity);
        smem.q_full[r].arrive_expect(cfg::consumers * (QTile::bytes + DoTile::bytes + 2 * 4 * 64));
        for (int c = 0; c < cfg::consumers; ++c) {
            const i64 first = work.statistics(args, r) + min(work.begin / 64 + c, PairTile::count(args.q_len) - 1) * 64;
            ptx::bulk_load(smem.lse_log2[r * cfg::consumers + c], args.lse_log2 + first, 4 * 64, smem.q_full[r]);
            ptx::bulk_load(smem.delta[r * cfg::consumers + c], args.delta + first, 4 * 64, smem.q_full[r]);
            load_tile(args.q, smem.q[r * cfg::consumers + c], smem.q_full[r], work.entry(r), work.begin + c * 64, work.head);
            load_tile(args.d_o, smem.d_o[r * cfg::consumers + c], smem.q_full[r], work.entry(r), work.begin + c * 64, work.head);
        }
    }
    __device__ void load_bias(const TriangleWork& work, i32 tile) {
        const PairTile* tiles = reinterpret_cast<const PairTile*>(args.tiles);
        for (int c = 0; c < cfg::consumers; ++c) {
            smem.bias_empty[c].wait(bias_parity);
            smem.bias_full[c].arrive_expect(PairTile::bytes);
            ptx::bulk_load(smem.bias[c].data, tiles + work.tile(args, work.begin / 64 + c, tile), PairTile::bytes, smem.bias_full[c]);
        }
        bias_parity ^= 1;
    }
    __device__ void load_kv(const TriangleWork& work, int r, i32 tile) {
        smem.kv_empty[kv.stage].wait(kv.parity ^ 1);
        smem.kv_full[kv.stage].arrive_expect(KTile::bytes + VTile::bytes);
        load_tile(args.k, smem.k[kv.stage], smem.kv_full[kv.stage], work.entry(r), tile * 64, work.head);
        load_tile(args.v, smem.v[kv.stage], smem.kv_full[kv.stage], work.entry(r), tile * 64, work.head);
        kv.advance();
    }
};

__device__ void produce(const Args& args, Smem& smem) {
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x != 0) return;
    Producer producer{args, smem};
    const i32 tiles = PairTile::count(args.kv_len);
    for (TriangleWorks works(args, args.q_len, 64 * cfg::consumers, args.part_rows); works.more(); works.next()) {
        const TriangleWork whole = works.at();
        for (i32 n = whole.n_begin; n < whole.n_end; n += cfg::rows, producer.q_parity ^= 1) {
            const TriangleWork work = some_of(whole, n);
            for (i32 tile = 0; tile < tiles; ++tile) {
                for (int r = 0; r < cfg::rows; ++r) {
                    if (tile == 0) producer.load_q(work, r);
                    if (r == 0) producer.load_bias(work, tile);
                    producer.load_kv(work, r, tile);
                }
            }
        }
    }
}

struct Consumer {
    static constexpr int rows = cfg::rows;
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    const SmemDescriptor<QTile> q_rows;
    const SmemDescriptor<DoTile> do_rows;
    const SmemDescriptor<KTile> k_columns, k_rows;
    const SmemDescriptor<VTile> v_columns;
    const float scale_log2;
    const i32 tiles;
    Ring<cfg::stages> kv{};
    u32 q_parity = 0, bias_parity = 0;
    float s[SMma::accumulators], dp[SMma::accumulators], dq[rows][DqMma::accumulators], bias[PairTile::each];
    PairSum sum;
    u32 ds[SMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          q_rows(SmemDescriptor<QTile>::of_columns(smem.q).stage(index)), do_rows(SmemDescriptor<DoTile>::of_columns(smem.d_o).stage(index)),
          k_columns(SmemDescriptor<KTile>::of_columns(smem.k)), k_rows(SmemDescriptor<KTile>::of_rows(smem.k)),
          v_columns(SmemDescriptor<VTile>::of_columns(smem.v)), scale_log2(args.scale * float(log2_e)), tiles(PairTile::count(args.kv_len)) {}

    // Said by each warp when it has read a stage.
    __device__ void release(ptx::Mbarrier& empty) const {
        if (lane % 32 == 0) empty.arrive();
    }

    __device__ void start_s(int r, i32 tile) {
        const SmemDescriptor<QTile> q = q_rows.stage(r * cfg::consumers);
        const SmemDescriptor<KTile> k = k_columns.stage(kv.stage);
        if (tile == 0) smem.q_full[r].wait(q_parity);
        smem.kv_full[kv.stage].wait(kv.parity);
        ptx::wgmma_discard(s);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) SMma::multiply(s, q.columns(i), k.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dp(int r) {
        const SmemDescriptor<DoTile> d_o = do_rows.stage(r * cfg::consumers);
        const SmemDescriptor<VTile> v = v_columns.stage(kv.stage);
        ptx::wgmma_discard(dp);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i) DpMma::multiply(dp, d_o.columns(i), v.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_dq(int r, u32 stage) {
        const SmemDescriptor<KTile> b = k_rows.stage(stage);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < SMma::accumulators / 8; ++i) DqMma::multiply(dq[r], ds + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void take_bias() {
        smem.bias_full[index].wait(bias_parity), bias_parity ^= 1;
        smem.bias[index].get(bias, lane);
    }
    // What threads read is given back when it has come: a copy may overtake loads. No product is in flight.
    __device__ void release_read(int r, bool is_last) const {
        if (r > 0 && !is_last) return;
        ptx::fence_async_smem();
        __syncwarp();
        if (r == 0) release(smem.bias_empty[index]);
        if (is_last) release(smem.q_empty[r]);
    }

    // S, dP and dS of a unit; where it is `later`, dq of the unit before, of n `before`, runs beside S.
    template <bool later>
    __device__ void step(int r, int before, const TriangleWork& work, i32 tile, Keys::Word word) {
        const u32 stage = kv.stage;
        if constexpr (later) {
            start_dq(before, stage);
            kv.advance();
        }
        start_s(r, tile);
        float lse_log2[2], delta[2];  // read anew for each unit: kept, they take four registers for each n
        load_statistics(r, work, lse_log2, delta);
        if (r == 0) take_bias();
        ptx::wgmma_wait<0>();
        if constexpr (later) release(smem.kv_empty[stage]);
        start_dp(r);  // when dS of the unit before has left its registers; it runs beside the exponentials
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) s[i] = __fmaf_rn(s[i], scale_log2, bias[i]);
        Keys::apply(word, s);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) s[i] = ptx::exp2(s[i] - lse_log2[fragment_row(i)]);
        ptx::wgmma_wait<0>();
        release_read(r, tile == tiles - 1);
#pragma unroll
        for (int i = 0; i < SMma::accumulators; ++i) {
            s[i] *= dp[i] - delta[fragment_row(i)];
            sum.take(r, i, s[i]);
        }
#pragma unroll
        for (int i = 0; i < SMma::accumulators; i += 2) ds[i / 2] = Element::pack(s[i], s[i + 1]);
    }
    // The keys, for some n. `is_first`: whether these are the work's first.
    __device__ void attend(const TriangleWork& work, bool is_first) {
        Keys::Word words[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            words[r] = Keys::word(args, work.entry(r).index, 0);
#pragma unroll
            for (float& x : dq[r]) x = 0.f;
        }
        step<false>(0, 0, work, 0, words[0]);
#pragma unroll 1
        for (i32 next = 1;; ++next) {
            const i32 ahead = min(next, tiles - 1);  // words are asked for long before they are used
            words[0] = Keys::word(args, work.entry(0).index, ahead);
#pragma unroll
            for (int r = 1; r < rows; ++r) {
                step<true>(r, r - 1, work, next - 1, words[r]);
                words[r] = Keys::word(args, work.entry(r).index, ahead);
            }
            sum.add(args, work, work.begin / 64 + index, next - 1, is_first);
            if (next == tiles) break;
            step<true>(0, rows - 1, work, next, words[0]);
        }
        q_parity ^= 1;
        start_dq(rows - 1, kv.stage);
        ptx::wgmma_wait<0>();
        release(smem.kv_empty[kv.stage]);
        kv.advance();
        store(work);
    }
    __device__ i32 row(const TriangleWork& work) const { return work.begin + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4; }
    // Of this thread's rows. P of an n that is none is 0; a query that is none has lse of +inf (attn_bwd_delta.cu), and beside them nothing is
    // stored.
    __device__ void load_statistics(int r, const TriangleWork& work, float (&lse_log2)[2], float (&delta)[2]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 at = lane / 32 * 16 + lane % 32 / 4 + 8 * i;
            lse_log2[i] = work.has(r) ? smem.lse_log2[r * cfg::consumers + index][at] : -minus_inf;
            delta[i] = smem.delta[r * cfg::consumers + index][at];
        }
    }
    __device__ void store(const TriangleWork& work) const {
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            if (!work.has(r)) continue;
            store_rows(args.dq.rows(work.entry(r), work.head), args.dq.row_bytes, row(work), args.q_len, cfg::head_dim, dq[r], args.scale);
        }
        __syncwarp();
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    for (TriangleWorks works(args, args.q_len, 64 * cfg::consumers, args.part_rows); works.more(); works.next()) {
        const TriangleWork work = works.at();
        for (i32 n = work.n_begin; n < work.n_end; n += cfg::rows) consumer.attend(some_of(work, n), n == work.n_begin);
    }
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_bwd_triangle_dq(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        constexpr u32 readers = 4 * cfg::consumers;
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map), ptx::prefetch(args.d_o.map);
        for (int i = 0; i < cfg::rows; ++i) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        for (int i = 0; i < cfg::stages; ++i) smem.kv_full[i].init(1), smem.kv_empty[i].init(readers);
        for (int i = 0; i < cfg::consumers; ++i) smem.bias_full[i].init(1), smem.bias_empty[i].init(4);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x < 128) produce(args, smem);
    else consume(args, smem);
}
