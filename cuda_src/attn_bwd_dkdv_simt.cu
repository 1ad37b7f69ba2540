// dk and dv in plain CUDA C, for any number format, stride and GPU: the first kernel of a pair, in the format's own precision. The
// formulas are attn_bwd.cu's.
//
// A block of 16 x 16 threads owns cfg::tile_kv keys of one head of k and v and goes over the query tiles that keep any of them, for
// each query head of the group. All threads load, cfg::chunk columns at a time: Q and K for S, dO and V for dP, then dO, but for its
// last columns, for dv += P' dO and Q for dk += dS' Q. Thread (y, x) has queries y, y + 16, ... and keys x, x + 16, ... of S and dP;
// keys and columns of dk and dv are spread over y and x as vectors. Nothing is added across blocks.
//
//   barrier                  arrives        waits          protects
//   __syncthreads, before    every thread   every thread   smem.a and smem.b, after a tile's last product smem.p and smem.ds: read
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
template struct KvSchedulerOption<Scheduler>;
static_assert(cfg::tile_q % 16 == 0 && cfg::tile_kv % 16 == 0 && cfg::chunk % 16 == 0);

struct Smem {
    Numbers<cfg::tile_q, cfg::chunk> a;
    Numbers<cfg::tile_kv, cfg::chunk> b;
    Numbers<cfg::tile_q, cfg::tile_kv> p, ds;
};
constexpr int q_each = cfg::tile_q / 16, keys_each = cfg::tile_kv / 16;
constexpr int chunks = (cfg::head_dim + cfg::chunk - 1) / cfg::chunk, v_chunks = (cfg::head_dim_v + cfg::chunk - 1) / cfg::chunk;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), 256, false};

// Of a thread's c-th number in a row of dk or dv.
__device__ inline int column_of(int thread, int c) {
    constexpr int each = cfg::chunk / 16;
    return c / each * cfg::chunk + Spread<each>::index(thread, c % each);
}

// This is what a query head's rows are read from.
struct QueryHead {
    AnyMatrix q, d_o;

    __device__ QueryHead(const Args& args, const Rows& rows, i32 head)
        : q(any_matrix_of(args.q, rows.q, head)), d_o(any_matrix_of(args.d_o, rows.q, head)) {}
};

struct Block {
    const Args& args;
    Smem& smem;
    const Rows rows;
    const Place at{};
    const i32 kv_begin;
    const AnyMatrix k, v;
    Number dk[keys_each][chunks * cfg::chunk / 16] = {}, dv[keys_each][v_chunks * cfg::chunk / 16] = {};

    __device__ Block(const Args& args, Smem& smem, const KvWorkTile& work)
        : args(args), smem(smem), rows(args, work.batch), kv_begin(work.kv_tile * cfg::tile_kv), k(any_matrix_of(args.k, rows.kv, work.kv_head)), v(any_matrix_of(args.v, rows.kv, work.kv_head)) {}

    // smem.p and smem.ds of a tile of queries.
    __device__ void weigh(const QueryHead& head, const WorkTile& work, const Number* lse_log2, const Number* delta) {
        const Mask mask(args, rows, work);
        const Score score(args, rows, work);
        const Weight weight(args, rows, work);
        const i32 q_begin = work.q_begin;
        const Number factor = Weight::factor(args);
        Number s[q_each][keys_each] = {}, dp[q_each][keys_each] = {};
#pragma unroll 1
        for (int column = 0; column < cfg::head_dim; column += cfg::chunk) {
            __syncthreads();
            smem.a.load<QElement>(head.q, q_begin, rows.q_len, column, cfg::head_dim, cfg::scale_sign);
            smem.b.load<KvElement>(k, kv_begin, rows.kv_len, column, cfg::head_dim);
            __syncthreads();
            multiply_columns(s, smem.a, smem.b);
        }
#pragma unroll 1
        for (int column = 0; column < cfg::head_dim_v; column += cfg::chunk) {
            __syncthreads();
            smem.a.load<OElement>(head.d_o, q_begin, rows.q_len, column, cfg::head_dim_v);
            smem.b.load<KvElement>(v, kv_begin, rows.kv_len, column, cfg::head_dim_v);
            __syncthreads();
            multiply_columns(dp, smem.a, smem.b);
        }
#pragma unroll
        for (int i = 0; i < q_each; ++i) {
            const int r = at.y + 16 * i;
            const i32 q = q_begin + r, first = kv_begin + at.x;
            const auto kept = mask.row(q, first);
#pragma unroll
            for (int j = 0; j < keys_each; ++j) {
                const Number t = score(s[i][j], q, first + 16 * j);
                const bool keep = kept.keep(16 * j) && q < rows.q_len;
                const Number w = keep ? ptx::exp2(t * score.scale_log2 - lse_log2[r]) : Number(0);
                const Number gradient = weight(dp[i][j], q, first + 16 * j) * factor - delta[r];
                smem.p.data[r][at.x + 16 * j] = weight(w, q, first + 16 * j);
                smem.ds.data[r][at.x + 16 * j] = keep ? w * score.derivative(s[i][j], q, first + 16 * j) * gradient : Number(0);
            }
        }
    }
    __device__ void add(const QueryHead& head, i32 q_begin) {
#pragma unroll
        for (int chunk = v_chunks - 1; chunk >= 0; --chunk) {
            __syncthreads();
            if (chunk < v_chunks - 1) {  // the last one is there
                smem.a.load<OElement>(head.d_o, q_begin, rows.q_len, chunk * cfg::chunk, cfg::head_dim_v);
                __syncthreads();
            }
            multiply_rows(dv, chunk * cfg::chunk, smem.p, smem.a);
        }
#pragma unroll
        for (int chunk = 0; chunk < chunks; ++chunk) {
            __syncthreads();
            smem.a.load<QElement>(head.q, q_begin, rows.q_len, chunk * cfg::chunk, cfg::head_dim, cfg::scale_sign);
            __syncthreads();
            multiply_rows(dk, chunk * cfg::chunk, smem.ds, smem.a);
        }
    }
    template <int n>
    __device__ void store(const StridedOutput& to, i32 head, int end, const Number (&x)[keys_each][n], Number factor) const {
#pragma unroll
        for (int i = 0; i < keys_each; ++i) {
            const i32 key = kv_begin + Spread<keys_each>::index(at.y, i);
            if (key >= rows.kv_len) continue;
            KvElement* row = reinterpret_cast<KvElement*>(to.rows(rows.kv, head) + key * to.row_bytes);
#pragma unroll
            for (int c = 0; c < n; ++c)
                if (const int column = column_of(at.x, c); column < end) row[column] = KvElement::narrow(x[i][c] * factor);
        }
    }
};

__device__ void compute(const Args& args, Smem& smem, const KvWorkTile& work) {
    Block block(args, smem, work);
    Walk::visit(args, block.rows, work, [&](i32 q_head, i32 tile) {
        const QueryHead head(args, block.rows, q_head);
        const i64 first = i64(place_of(args, block.rows, q_head, tile)) * cfg::tile_q;
        block.weigh(head, {work.batch, q_head, tile * cfg::tile_q, 0}, args.lse_log2 + first, args.delta + first);
        block.add(head, tile * cfg::tile_q);
    });
    block.store(args.dk, work.kv_head, cfg::head_dim, block.dk, args.scale);
    block.store(args.dv, work.kv_head, cfg::head_dim_v, block.dv, Weight::factor(args));
}

extern "C" __global__ __launch_bounds__(256, cfg::blocks) void attn_bwd_dkdv_simt(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Scheduler scheduler(args);
    const KvWorkTile work = scheduler.next();
    if (!work.is_last()) compute(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
