// dq in plain CUDA C, for any number format, stride and GPU: the second kernel of a pair. The formulas are attn_bwd.cu's.
//
// A block of 16 x 16 threads owns cfg::tile_q query rows of one head and goes over the key tiles that they keep. All threads load,
// cfg::chunk columns at a time: dO and V for dP, Q and K for S, then K, but for its last columns, for dq += dS K. Thread (y, x) has
// rows y, y + 16, ... of all, and keys x, x + 16, ...; columns of dq are spread over x as vectors.
//
//   barrier                  arrives        waits          protects
//   __syncthreads, before    every thread   every thread   smem.a and smem.b, after a tile's last product smem.ds: read
//   __syncthreads, behind    every thread   every thread   the same: written

#include "config.cuh"  // rendered: cfg, StridedTensor, StridedOutput, Args, and the options Element, Rows, Mask, Score, Weight, Scheduler, Walk
#include "tile/facts.cuh"
#include "tile/numbers.cuh"
#include "variant/interfaces_bwd.cuh"

template struct NumberElements<QElement, KvElement, OElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct WeightOption<Weight>;
template struct SchedulerOption<Scheduler>;
static_assert(cfg::tile_q % 16 == 0 && cfg::tile_kv % 16 == 0 && cfg::chunk % 16 == 0);

struct Smem {
    Numbers<cfg::tile_q, cfg::chunk> a;
    Numbers<cfg::tile_kv, cfg::chunk> b;
    Numbers<cfg::tile_q, cfg::tile_kv> ds;
};
constexpr int q_each = cfg::tile_q / 16, keys_each = cfg::tile_kv / 16, chunks = (cfg::head_dim + cfg::chunk - 1) / cfg::chunk, each = cfg::chunk / 16;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 256, false};

struct Block {
    const Args& args;
    Smem& smem;
    const Rows rows;
    const Mask mask;
    const Score score;
    const Weight weight;
    const Place at{};
    const i32 q_begin;
    const AnyMatrix q, k, v, d_o;
    Number dq[q_each][chunks * each] = {};

    __device__ Block(const Args& args, Smem& smem, const WorkTile& work)
        : args(args), smem(smem), rows(args, work.batch), mask(args, rows, work), score(args, rows, work), weight(args, rows, work), q_begin(work.q_begin),
          q(any_matrix_of(args.q, rows.q, work.head)), k(any_matrix_of(args.k, rows.kv, work.head / args.heads_per_kv)),
          v(any_matrix_of(args.v, rows.kv, work.head / args.heads_per_kv)), d_o(any_matrix_of(args.d_o, rows.q, work.head)) {}

    // smem.ds of a tile of keys.
    __device__ void differentiate(i32 kv_begin, const Number* lse_log2, const Number* delta) {
        const Number factor = Weight::factor(args);
        Number s[q_each][keys_each] = {}, dp[q_each][keys_each] = {};
#pragma unroll 1
        for (int column = 0; column < cfg::head_dim_v; column += cfg::chunk) {
            __syncthreads();
            smem.a.load<OElement>(d_o, q_begin, rows.q_len, column, cfg::head_dim_v);
            smem.b.load<KvElement>(v, kv_begin, rows.kv_len, column, cfg::head_dim_v);
            __syncthreads();
            multiply_columns(dp, smem.a, smem.b);
        }
#pragma unroll 1
        for (int column = 0; column < cfg::head_dim; column += cfg::chunk) {
            __syncthreads();
            smem.a.load<QElement>(q, q_begin, rows.q_len, column, cfg::head_dim, cfg::scale_sign);
            smem.b.load<KvElement>(k, kv_begin, rows.kv_len, column, cfg::head_dim);
            __syncthreads();
            multiply_columns(s, smem.a, smem.b);
        }
#pragma unroll
        for (int i = 0; i < q_each; ++i) {
            const int r = at.y + 16 * i;
            const i32 row = q_begin + r, first = kv_begin + at.x;
            const auto kept = mask.row(row, first);
#pragma unroll
            for (int j = 0; j < keys_each; ++j) {
                const Number t = score(s[i][j], row, first + 16 * j), w = ptx::exp2(t * score.scale_log2 - lse_log2[r]);
                const Number gradient = weight(dp[i][j], row, first + 16 * j) * factor - delta[r];
                const bool keep = kept.keep(16 * j) && row < rows.q_len;
                smem.ds.data[r][at.x + 16 * j] = keep ? w * score.derivative(s[i][j], row, first + 16 * j) * gradient : Number(0);
            }
        }
    }
    __device__ void add(i32 kv_begin) {
#pragma unroll
        for (int chunk = chunks - 1; chunk >= 0; --chunk) {
            __syncthreads();
            if (chunk < chunks - 1) {  // the last one is there
                smem.b.load<KvElement>(k, kv_begin, rows.kv_len, chunk * cfg::chunk, cfg::head_dim);
                __syncthreads();
            }
            multiply_plain(dq, chunk * cfg::chunk, smem.ds, smem.b);
        }
    }
    __device__ void store(i32 head) const {
#pragma unroll
        for (int i = 0; i < q_each; ++i) {
            const i32 row = q_begin + at.y + 16 * i;
            if (row >= rows.q_len) continue;
            QElement* to = reinterpret_cast<QElement*>(args.dq.rows(rows.q, head) + row * args.dq.row_bytes);
#pragma unroll
            for (int c = 0; c < chunks * each; ++c)
                if (const int column = c / each * cfg::chunk + Spread<each>::index(at.x, c % each); column < cfg::head_dim)
                    to[column] = QElement::narrow(dq[i][c] * (args.scale * cfg::scale_sign));
        }
    }
};

__device__ void compute(const Args& args, Smem& smem, const WorkTile& work) {
    Block block(args, smem, work);
    if (work.q_begin >= block.rows.q_len) return;
    const i64 first = i64(place_of(args, block.rows, work.head, work.q_begin / cfg::tile_q)) * cfg::tile_q;
#pragma unroll 1
    for (Walk walk(block.mask, block.rows, work, work.q_begin, cfg::tile_q); walk.more(); walk.advance()) {
        block.differentiate(walk.tile() * cfg::tile_kv, args.lse_log2 + first, args.delta + first);
        block.add(walk.tile() * cfg::tile_kv);
    }
    block.store(work.head);
}

extern "C" __global__ __launch_bounds__(256, cfg::blocks) void attn_bwd_dq_simt(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) compute(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
