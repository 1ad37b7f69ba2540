// attn_bwd_captured.cu by tensor cores, with mma.sync and cp.async, on any GPU from Ampere on: the same sums of the same gradients.
//
// A block owns cfg::tile_q query rows of one head, or of several one after the other, 16 for each warp, and goes over the key tiles
// that they keep. Q and dO are loaded once for a head, K and V for each tile, by every thread; S and dP stay in registers.
//
//   barrier                  arrives        waits          protects
//   copy group of a tile     its copies     its thread     a thread's part of K and V, of the first tile's Q and dO, until it is there
//   __syncthreads, before    every thread   every thread   K and V, Q and dO of the head before, smem.gather until read
//   __syncthreads, behind    every thread   every thread   all parts until they are there

#include "config.cuh"  // rendered: cfg, StridedTensor, Args, and the options Element, Rows, Mask, Score, Weight, Gradient, Sums, Layout, Gather,
                       // Statistics, Scheduler, Walk
#include "tile/facts.cuh"
#include "tile/swizzled.cuh"
#include "tile/warp_sums.cuh"
#include "variant/pair_elements.cuh"
#include "variant/interfaces_bwd.cuh"

using QTile = SwizzledTile<cfg::tile_q, cfg::head_dim>;
using DoTile = SwizzledTile<cfg::tile_q, cfg::head_dim_v>;
using KTile = SwizzledTile<cfg::tile_kv, cfg::head_dim>;
using VTile = SwizzledTile<cfg::tile_kv, cfg::head_dim_v>;

template struct ElementOption<Element>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct SchedulerOption<Scheduler>;
template struct GradientOption<Gradient>;
template struct SumsOption<Sums>;
template struct LayoutOption<Layout>;
template struct GatherOption<Gather, Gradient, Layout>;
static_assert(cfg::tile_q == 16 * Layout::warps && cfg::threads == 32 * Layout::warps && cfg::tile_kv % 16 == 0);

struct Smem {
    QTile q;
    DoTile d_o;
    KTile k;
    VTile v;
    Gather::Shared gather;
};
extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, false};

using Products = float[cfg::tile_kv / 16][1][8];  // of a warp's 16 rows and the keys of a tile

struct Block {
    const Args& args;
    Smem& smem;
    const Rows rows;
    const Mask mask;
    const Score score;
    const Weight weight;
    const Gradient gradient;
    const i32 q_begin;
    const AnyMatrix q, k, v, d_o;
    Gather gather;

    __device__ Block(const Args& args, Smem& smem, const WorkTile& work)
        : args(args), smem(smem), rows(args, work.batch), mask(args, rows, work), score(args, rows, work), weight(args, rows, work), gradient(args, rows, work),
          q_begin(work.q_begin), q(any_matrix_of(args.q, rows.q, work.head)), k(any_matrix_of(args.k, rows.kv, work.head / args.heads_per_kv)),
          v(any_matrix_of(args.v, rows.kv, work.head / args.heads_per_kv)), d_o(any_matrix_of(args.d_o, rows.q, work.head)), gather(args, smem.gather) {}

    // Loads a tile of keys, and before the first one the queries.
    __device__ void load(i32 kv_begin, bool is_first) {
        __syncthreads();
        if (is_first) {
            smem.q.fill(q, q_begin, rows.q_len - 1);
            smem.d_o.fill(d_o, q_begin, rows.q_len - 1);
        }
        smem.k.fill(k, kv_begin, rows.kv_len - 1);
        smem.v.fill(v, kv_begin, rows.kv_len - 1);
        ptx::cp_async_commit();
        ask_for_elements(score, q_begin + i32(threadIdx.x / 2), kv_begin + i32(threadIdx.x % 2) * (cfg::tile_kv / 2));
        ptx::cp_async_wait<0>();
        __syncthreads();
    }
    // Adds the tile that was loaded.
    __device__ void add(i32 kv_begin, const Number* lse_log2, const Number* delta) {
        Products s, dp;
        multiply_columns<QTile::chunks / 2>(s, smem.q, smem.k);
        multiply_columns<DoTile::chunks / 2>(dp, smem.d_o, smem.v);
        const float factor = Weight::factor(args);
#pragma unroll
        for (int i = 0; i < Layout::rows; ++i) {
            __syncwarp();  // else the compiler loads what scores read in the midst of the products, and spills
            const i32 row = q_begin + Layout::row(i), first = kv_begin + Layout::first_key();
            const float lse = lse_log2[Statistics::place(Layout::row(i))], own_delta = delta[Statistics::place(Layout::row(i))];
            const auto kept = mask.row(row, first);
            const PairRow at = {row + rows.q_offset, first + rows.kv_offset, row < rows.q_len ? rows.kv_len - first : 0};
            const auto by_element = gradient.row(at.q, at.first);
            Number dots[Layout::keys], logits[Layout::keys], found[Layout::keys];
#pragma unroll
            for (int j = 0; j < Layout::keys; ++j) logits[j] = dots[j] = s[j / 4][0][j / 2 % 2 * 4 + i * 2 + j % 2] * cfg::scale_sign;
            make_logits(logits, score.row(row, first));
#pragma unroll
            for (int j = 0; j < Layout::keys; ++j) {
                const i32 offset = Layout::offset(j), kv = first + offset;
                const float w = ptx::exp2(logits[j] * score.scale_log2 - lse);
                const float of_logit = w * (weight(dp[j / 4][0][j / 2 % 2 * 4 + i * 2 + j % 2], row, kv) * factor - own_delta);
                const bool keep = kept.keep(offset) && row < rows.q_len;
                found[j] = keep ? of_logit * by_element.value(dots[j], offset) : 0.f;
            }
            gather.add(i, found, dots, by_element, gradient, at);
        }
        gather.end_tile(gradient, rows, q_begin, kv_begin);
    }

   private:
    // Makes logits of a row's dot products, of two neighbouring keys at once where their arrays lie so.
    template <class Row>
    __device__ static void make_logits(Number (&x)[Layout::keys], const Row& own) {
        if constexpr (requires { own.has_pairs(0); })
            if (own.has_pairs(Layout::offset(Layout::keys - 1))) {
#pragma unroll
                for (int j = 0; j < Layout::keys; j += 2) own.pair(x[j], x[j + 1], Layout::offset(j));
                return;
            }
#pragma unroll
        for (int j = 0; j < Layout::keys; ++j) x[j] = own.value(x[j], Layout::offset(j));
    }
    // sums = a b' of this warp's rows and all keys.
    template <int steps, class A, class B>
    __device__ void multiply_columns(Products& sums, const A& a, const B& b) const {
        const auto queries = BlockReader<A>::down(a, threadIdx.x / 32 * 16);
        const auto keys = BlockReader<B>::right(b);
        clear(sums);
        const auto load_queries = [&](u32(&to)[4], int step, int i) { ptx::ldmatrix(to, queries.block(i, step)); };
        const auto load_keys = [&](u32(&to)[4], int step, int j) { ptx::ldmatrix(to, keys.block(j, step)); };
        multiply<steps>(sums, load_queries, load_keys);
    }
};

__device__ void compute(const Args& args, Smem& smem, const WorkTile& work) {
    Block block(args, smem, work);
    if (work.q_begin >= block.rows.q_len) return;
    const i64 first = i64(place_of(args, block.rows, work.head, work.q_begin / cfg::tile_q)) * cfg::tile_q;
    bool is_first = true;
#pragma unroll 1
    for (Walk walk(block.mask, block.rows, work, work.q_begin, cfg::tile_q); walk.more(); walk.advance()) {
        block.load(walk.tile() * cfg::tile_kv, is_first);
        block.add(walk.tile() * cfg::tile_kv, args.lse_log2 + first, args.delta + first);
        is_first = false;
    }
    block.gather.finish(block.gradient, block.rows, work.q_begin);
}

extern "C" __global__ __launch_bounds__(cfg::threads, cfg::ctas_per_sm) void attn_bwd_captured_mma(const __grid_constant__ Args args) {
    extern __shared__ __align__(128) unsigned char raw[];
    Scheduler scheduler(args);
#pragma unroll 1
    for (WorkTile work = scheduler.next(); !work.is_last(); work = scheduler.next()) compute(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
