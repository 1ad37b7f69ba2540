// Forward attention with a bias of pairs that entries of the batch share, on Hopper: o = softmax(scale q k^T + bias) v.
//
// A block computes 64 queries for each of cfg::consumers warpgroups, of one head, for cfg::rows entries of the batch ("rows n") that share the
// bias, then takes its next such work. A tile of the bias is brought once for all of them: their states stay in registers, and a
// warpgroup goes over the n for each tile of keys. A unit is one n and one tile. Lane 0 of warp 0 loads.
//
//   start S, O += P V of the unit before | wait S | softmax | wait O
//
//   barrier                        arrives                         waits             protects
//   q_full[r]                      TMA (bytes of Q of n r)         each consumer     smem.q of n r until read
//   q_empty[r]                     one lane per consumer warp      producer          the same until refilled
//   k_full[s], k_empty[s], v_full[s], v_empty[s]: the same for a unit's K and V
//   bias_full[c], bias_empty[c]: the same for the bias tile of consumer c, whose four warps alone read it
//
// Works are taken in order, a block every gridDim.x-th: queries first, so that K and V of the n come from L2, then n, then heads. The last n
// of a batch are computed several times where there are too few, and stored once.

#include "config.cuh"  // rendered: cfg, TmaTensor, Args, QkMma, PvMma, and the options Element, Rows, Keys, Exponent, Store
#include "ptx/bulk.cuh"
#include "tile/facts.cuh"
#include "tile/pair_tile.cuh"
#include "tile/ring.cuh"
#include "tile/store_fragment.cuh"
#include "tile/tile.cuh"
#include "tile/triangle_work.cuh"
#include "variant/interfaces.cuh"
#include "variant/interfaces_triangle.cuh"

using QTile = Tile<64, cfg::head_dim>;
using KTile = Tile<64, cfg::head_dim>;
using VTile = Tile<64, cfg::head_dim_v>;

struct Smem {
    QTile q[cfg::rows * cfg::consumers];  // of n r and consumer c: r * cfg::consumers + c
    KTile k[cfg::stages];
    VTile v[cfg::stages];
    PairTile bias[cfg::consumers];
    ptx::Mbarrier q_full[cfg::rows], q_empty[cfg::rows], k_full[cfg::stages], k_empty[cfg::stages], v_full[cfg::stages], v_empty[cfg::stages];
    ptx::Mbarrier bias_full[cfg::consumers], bias_empty[cfg::consumers];
};
static_assert(ptx::has_registers(cfg::producer_registers, cfg::consumer_registers, cfg::consumers), "setmaxnreg would hang");
template struct ElementOption<Element>;
template struct SameElements<Element, QElement, KvElement>;
template struct RowsOption<Rows>;
template struct KeysOption<Keys>;
template struct ExponentOption<Exponent>;
template struct StoreOption<Store>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 128 * (1 + cfg::consumers), true};

struct Producer {
    const Args& args;
    Smem& smem;
    Ring<cfg::stages> kv{};
    u32 q_parity = 1, bias_parity = 1;  // of the empty barriers

    __device__ void load_q(const TriangleWork& work, int r) {
        smem.q_empty[r].wait(q_parity);
        smem.q_full[r].arrive_expect(cfg::consumers * QTile::bytes);
        for (int c = 0; c < cfg::consumers; ++c)
            load_tile(args.q, smem.q[r * cfg::consumers + c], smem.q_full[r], work.entry(r), work.begin + c * 64, work.head);
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
        smem.k_empty[kv.stage].wait(kv.parity ^ 1);
        smem.k_full[kv.stage].arrive_expect(KTile::bytes);
        load_tile(args.k, smem.k[kv.stage], smem.k_full[kv.stage], work.entry(r), tile * 64, work.head);
        smem.v_empty[kv.stage].wait(kv.parity ^ 1);
        smem.v_full[kv.stage].arrive_expect(VTile::bytes);
        load_tile(args.v, smem.v[kv.stage], smem.v_full[kv.stage], work.entry(r), tile * 64, work.head);
        kv.advance();
    }
};

__device__ void produce(const Args& args, Smem& smem) {
    ptx::setmaxnreg_dec<cfg::producer_registers>();
    if (threadIdx.x != 0) return;
    Producer producer{args, smem};
    const i32 tiles = PairTile::count(args.kv_len);
    for (TriangleWorks works(args, args.q_len, 64 * cfg::consumers, cfg::rows); works.more(); works.next()) {
        const TriangleWork work = works.at();
        for (i32 tile = 0; tile < tiles; ++tile) {
            for (int r = 0; r < cfg::rows; ++r) {
                if (tile == 0) producer.load_q(work, r);
                if (r == 0) producer.load_bias(work, tile);
                producer.load_kv(work, r, tile);
            }
        }
        producer.q_parity ^= 1;
    }
}

// The softmax of one n: of a thread's two rows the reference, in log2 units, and the sum of its own columns.
struct RowState {
    static constexpr float lowest = -Limits<float>::largest;  // a reference of nothing
    float reference[2] = {lowest, lowest}, sum[2] = {0.f, 0.f};

    // From logits to weights. True, in the whole warp, where o must be multiplied by `shrink`: a reference follows its row's maximum at
    // a distance of 2^8 at most, so that this is seldom.
    template <int n>
    __device__ bool weigh(float (&s)[n], float (&shrink)[2]) {
        const auto most = [](float x, float y) { return fmaxf(x, y); };
        float top[2] = {fold_row(s, 0, most), fold_row(s, 1, most)};
        const bool moved = __any_sync(0xffffffffu, top[0] > reference[0] + 8.f || top[1] > reference[1] + 8.f);
        if (moved) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float before = reference[r];
                reference[r] = fmaxf(before, quad_max(top[r]));
                shrink[r] = ptx::exp2(before - reference[r]);
                sum[r] *= shrink[r];
            }
        }
#pragma unroll
        for (int i = 0; i < n; ++i) s[i] = Exponent::of(s[i] - reference[fragment_row(i)], i / 4 * 2 + i % 2);
        const auto add = [](float x, float y) { return x + y; };
#pragma unroll
        for (int r = 0; r < 2; ++r) sum[r] += fold_row(s, r, add);
        return moved;
    }
};

struct Consumer {
    static constexpr int rows = cfg::rows;
    const Args& args;
    Smem& smem;
    const u32 index, lane;  // of this warpgroup, of this thread in it
    const SmemDescriptor<QTile> q_rows;
    const SmemDescriptor<KTile> k_columns;
    const SmemDescriptor<VTile> v_rows;
    const float scale_log2;
    const i32 tiles;
    Ring<cfg::stages> k{}, v{};  // of the unit whose S is awaited; of the one whose P V is
    u32 q_parity = 0, bias_parity = 0;
    float s[QkMma::accumulators], o[rows][PvMma::accumulators], bias[PairTile::each];
    u32 p[QkMma::accumulators / 2];

    __device__ Consumer(const Args& args, Smem& smem)
        : args(args), smem(smem), index(ptx::uniform(threadIdx.x / 128) - 1), lane(threadIdx.x % 128),
          q_rows(SmemDescriptor<QTile>::of_columns(smem.q).stage(index)), k_columns(SmemDescriptor<KTile>::of_columns(smem.k)),
          v_rows(SmemDescriptor<VTile>::of_rows(smem.v)), scale_log2(args.scale * float(log2_e)), tiles(PairTile::count(args.kv_len)) {}

    // Said by each warp when it has read a stage.
    __device__ void release(ptx::Mbarrier& empty) const {
        if (lane % 32 == 0) empty.arrive();
    }

    __device__ void start_qk(int r, i32 tile) {
        const SmemDescriptor<QTile> a = q_rows.stage(r * cfg::consumers);
        const SmemDescriptor<KTile> b = k_columns.stage(k.stage);
        if (tile == 0) smem.q_full[r].wait(q_parity);
        smem.k_full[k.stage].wait(k.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < (cfg::head_dim + 15) / 16; ++i) QkMma::multiply(s, a.columns(i), b.columns(i), i > 0);
        ptx::wgmma_commit();
    }
    __device__ void start_pv(int r) {
        const SmemDescriptor<VTile> b = v_rows.stage(v.stage);
        smem.v_full[v.stage].wait(v.parity);
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < QkMma::accumulators / 8; ++i) PvMma::multiply(o[r], p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    __device__ void finish_pv() {
        ptx::wgmma_wait<0>();
        release(smem.v_empty[v.stage]);
        v.advance();
    }
    __device__ void take_bias() {
        smem.bias_full[index].wait(bias_parity), bias_parity ^= 1;
        smem.bias[index].get(bias, lane);
    }
    // Where its numbers have come, as weigh's vote is over all of them: the copy of the next tile may overtake loads.
    __device__ void release_bias() const {
        __syncwarp();
        release(smem.bias_empty[index]);
    }

    // S of a unit and, where it is `pending`, P V of the one before it, of n `before`, are issued together; this unit's softmax runs under
    // the latter.
    template <bool pending>
    __device__ void step(int r, int before, i32 tile, RowState& state, Keys::Word word) {
        float shrink[2];
        start_qk(r, tile);
        if constexpr (pending) start_pv(before);
        if (r == 0) take_bias();
        ptx::wgmma_wait<pending>();
        release(smem.k_empty[k.stage]);
        k.advance();
        if (tile == tiles - 1) release(smem.q_empty[r]);
#pragma unroll
        for (int i = 0; i < QkMma::accumulators; ++i) s[i] = __fmaf_rn(s[i], scale_log2, bias[i]);
        Keys::apply(word, s);
        const bool moved = state.weigh(s, shrink);
        if (r == 0) release_bias();
        if constexpr (pending) finish_pv();
        if (moved) {
#pragma unroll
            for (int i = 0; i < PvMma::accumulators; ++i) o[r][i] *= shrink[fragment_row(i)];
        }
#pragma unroll
        for (int i = 0; i < QkMma::accumulators; i += 2) p[i / 2] = Element::pack(s[i], s[i + 1]);
    }

    __device__ void attend(const TriangleWork& work) {
        RowState state[rows];
        Keys::Word words[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            words[r] = Keys::word(args, work.entry(r).index, 0);
#pragma unroll
            for (float& x : o[r]) x = 0.f;
        }
        step<false>(0, 0, 0, state[0], words[0]);
#pragma unroll 1
        for (i32 next = 1;; ++next) {
            const i32 ahead = min(next, tiles - 1);  // words are asked for long before they are used
            words[0] = Keys::word(args, work.entry(0).index, ahead);
#pragma unroll
            for (int r = 1; r < rows; ++r) {
                step<true>(r, r - 1, next - 1, state[r], words[r]);
                words[r] = Keys::word(args, work.entry(r).index, ahead);
            }
            if (next == tiles) break;
            step<true>(0, rows - 1, next, state[0], words[0]);
        }
        q_parity ^= 1;
        start_pv(rows - 1);
        finish_pv();
        store(work, state);
    }
    __device__ void store(const TriangleWork& work, const RowState (&state)[rows]) const {
        const i32 row = work.begin + i32(index) * 64 + lane / 32 * 16 + lane % 32 / 4;
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            if (!work.has(r)) continue;
            const Rows place(args, work.entry(r).index);
            const Store to(args, place, {work.entry(r).index, work.head, work.begin, 0});
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const bool inside = row + 8 * i < args.q_len;
                const float sum = quad_sum(state[r].sum[i]);
                const bool none = state[r].reference[i] <= RowState::lowest && sum == sum;  // no key is kept; NaN goes on
                store_row(to.o(row + 8 * i), inside, o[r], i, none ? 0.f : ptx::reciprocal(sum));
                const float lse = none ? minus_inf : (state[r].reference[i] + __log2f(sum)) * float(ln_2);
                if (threadIdx.x % 4 == 0 && inside) to.lse(row + 8 * i, lse);
            }
        }
        __syncwarp();
    }
};

__device__ void consume(const Args& args, Smem& smem) {
    ptx::setmaxnreg_inc<cfg::consumer_registers>();
    Consumer consumer(args, smem);
    for (TriangleWorks works(args, args.q_len, 64 * cfg::consumers, cfg::rows); works.more(); works.next()) consumer.attend(works.at());
}

extern "C" __global__ __launch_bounds__(128 * (1 + cfg::consumers), 1) void attn_fwd_triangle(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    if (threadIdx.x == 0) {
        constexpr u32 readers = 4 * cfg::consumers;
        ptx::prefetch(args.q.map), ptx::prefetch(args.k.map), ptx::prefetch(args.v.map);
        for (int i = 0; i < cfg::rows; ++i) smem.q_full[i].init(1), smem.q_empty[i].init(readers);
        for (int i = 0; i < cfg::stages; ++i) {
            smem.k_full[i].init(1), smem.k_empty[i].init(readers);
            smem.v_full[i].init(1), smem.v_empty[i].init(readers);
        }
        for (int i = 0; i < cfg::consumers; ++i) smem.bias_full[i].init(1), smem.bias_empty[i].init(4);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    if (threadIdx.x < 128) produce(args, smem);
    else consume(args, smem);
}
