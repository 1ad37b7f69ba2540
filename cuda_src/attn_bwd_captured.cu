// The gradient of an array that a score captured, in plain CUDA C, for any number format, stride and GPU: it runs after the kernels
// that make dq, dk and dv, once for each element that the score reads. The formulas are attn_bwd.cu's: with g = p (dp - delta), the
// gradient of a pair's logit, an element's is the sum of g times the logit's derivative by it, over the pairs that read it.
//
// A block of 16 x 16 threads owns cfg::tile_q query rows of one head, or of several one after the other, and goes over the key tiles
// that they keep. All threads load, cfg::chunk columns at a time: Q and K for S, dO and V for dP. Thread (y, x) has rows y, y + 16, ...
// and keys x, x + 16, ... What becomes of a pair's gradient is the option Gather: it follows from what the element's indices depend on.
//
//   barrier                  arrives        waits          protects
//   __syncthreads, before    every thread   every thread   smem.a and smem.b, after a tile's last product smem.gather: read
//   __syncthreads, behind    every thread   every thread   the same: written

#include "config.cuh"  // rendered: cfg, StridedTensor, Args, and the options Element, Rows, Mask, Score, Weight, Gradient, Sums, Layout, Gather,
                       // Statistics, Scheduler, Walk
#include "tile/facts.cuh"
#include "tile/numbers.cuh"
#include "variant/interfaces_bwd.cuh"

template struct NumberOption<Element>;
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
static_assert(cfg::tile_q % 16 == 0 && cfg::tile_kv % 16 == 0 && cfg::chunk % 16 == 0);

struct Smem {
    Numbers<cfg::tile_q, cfg::chunk> a;
    Numbers<cfg::tile_kv, cfg::chunk> b;
    Gather::Shared gather;
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 256, false};

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

    // Adds a tile of keys.
    __device__ void add(i32 kv_begin, const Number* lse_log2, const Number* delta) {
        Number s[Layout::rows][Layout::keys] = {}, dp[Layout::rows][Layout::keys] = {};
        multiply(s, q, k, kv_begin, cfg::head_dim, cfg::scale_sign);
        multiply(dp, d_o, v, kv_begin, cfg::head_dim_v, 1);
        const Number factor = Weight::factor(args);
#pragma unroll
        for (int i = 0; i < Layout::rows; ++i) {
            const int r = Layout::row(i);
            const i32 row = q_begin + r, first = kv_begin + Layout::first_key();
            const auto kept = mask.row(row, first);
            const PairRow at = {row + rows.q_offset, first + rows.kv_offset, row < rows.q_len ? rows.kv_len - first : 0};
            const auto by_element = gradient.row(at.q, at.first);
            Number found[Layout::keys];
#pragma unroll
            for (int j = 0; j < Layout::keys; ++j) {
                const i32 offset = Layout::offset(j), kv = first + offset;
                const Number x = s[i][j], w = ptx::exp2(score(x, row, kv) * score.scale_log2 - lse_log2[Statistics::place(r)]);
                const Number of_logit = w * (weight(dp[i][j], row, kv) * factor - delta[Statistics::place(r)]);
                const bool keep = kept.keep(offset) && row < rows.q_len;
                found[j] = keep ? of_logit * by_element.value(x, offset) : Number(0);
            }
            gather.add(i, found, s[i], by_element, gradient, at);
        }
        gather.end_tile(gradient, rows, q_begin, kv_begin);
    }

   private:
    // d += a b', a of the block's queries, b of a tile of keys.
    __device__ void multiply(Number (&d)[Layout::rows][Layout::keys], const AnyMatrix& a, const AnyMatrix& b, i32 kv_begin, int columns, Number sign) {
#pragma unroll 1
        for (int column = 0; column < columns; column += cfg::chunk) {
            __syncthreads();
            smem.a.load<Element>(a, q_begin, rows.q_len, column, columns, sign);
            smem.b.load<Element>(b, kv_begin, rows.kv_len, column, columns);
            __syncthreads();
            multiply_columns(d, smem.a, smem.b);
        }
    }
};

__device__ void compute(const Args& args, Smem& smem, const WorkTile& work) {
    Block block(args, smem, work);
    if (work.q_begin >= block.rows.q_len) return;
    const i64 first = i64(place_of(args, block.rows, work.head, work.q_begin / cfg::tile_q)) * cfg::tile_q;
#pragma unroll 1
    for (Walk walk(block.mask, block.rows, work, work.q_begin, cfg::tile_q); walk.more(); walk.advance())
        block.add(walk.tile() * cfg::tile_kv, args.lse_log2 + first, args.delta + first);
    block.gather.finish(block.gradient, block.rows, work.q_begin);
}

extern "C" __global__ __launch_bounds__(256, 2) void attn_bwd_captured(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Scheduler scheduler(args);
#pragma unroll 1
    for (WorkTile work = scheduler.next(); !work.is_last(); work = scheduler.next()) compute(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
