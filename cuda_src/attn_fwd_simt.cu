// Forward attention in plain CUDA C: o = softmax(mask(score(q k^T))) v, for any number format, stride and GPU. It computes in the
// format's own precision (16-bit formats in float32), so the other kernels are tested against it, too.
//
// A block computes cfg::tile_q query rows of one head, in groups of 16 threads. Group g has rows g, g + groups, ... of the tile.
// Lane l of a group has keys l, l + 16, ... of a key tile, and of the result vectors l, l + 16, ... of columns. All threads load,
// and convert: Q once, then of each key tile K and V, cfg::chunk and cfg::v_chunk columns at a time.
//
//   barrier                 arrives        waits          protects
//   __syncthreads, loaded   every thread   every thread   smem.kv (at first smem.q, with V smem.p) until written
//   __syncthreads, read     every thread   every thread   smem.kv (with V smem.p) until read

#include "config.cuh"  // rendered: cfg, StridedTensor, Args, and the options
                       // Element, Rows, Mask, Score, Softmax, Weight, Kv, Scheduler, Store, Walk
#include "tile/facts.cuh"
#include "tile/log_sum.cuh"
#include "tile/number.cuh"
#include "tile/range.cuh"
#include "tile/rows_upto.cuh"
#include "variant/interfaces.cuh"

template struct NumberElements<QElement, KvElement, OElement>;
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct WeightOption<Weight>;
template struct NumbersKvOption<Kv>;
template struct SchedulerOption<Scheduler>;
template struct StoreOption<Store>;
template struct CursorOption<Walk, Mask>;

constexpr int groups = cfg::threads / 16, rows_each = cfg::tile_q / groups, keys_each = cfg::tile_kv / 16;
constexpr int chunks = (cfg::head_dim + cfg::chunk - 1) / cfg::chunk, v_chunks = (cfg::head_dim_v + cfg::v_chunk - 1) / cfg::v_chunk;

constexpr int widest = 16 / sizeof(Number);  // numbers that one instruction reads from shared memory
constexpr int width_v = cfg::v_chunk % (16 * widest) == 0 ? widest : 1, vectors_v = cfg::v_chunk / (16 * width_v);

// A tile of numbers. Rows are a vector longer than their columns, so that a column's vectors in eight rows lie in different banks.
template <int rows, int columns>
struct alignas(16) Numbers {
    Number data[rows][columns + widest];

    template <int n>
    __device__ const Vector<Number, n>& vector(int row, int column) const {
        return *reinterpret_cast<const Vector<Number, n>*>(&data[row][column]);
    }

    // Every thread of the block loads its share of rows [first, first + rows), from column `column` of `end`. Columns past the end
    // are zeros, and so are rows that are not there. Sixteen loads of a thread are on their way together.
    template <class E, class Source>
    __device__ void load(const Source& source, i32 first, int column, int end, int sign = 1) {
        constexpr int warps = cfg::threads / 32, pieces = (columns + 31) / 32, ahead = pieces < 16 ? 16 / pieces * warps : warps;
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int begin = threadIdx.x / 32; begin < rows; begin += ahead)
#pragma unroll
            for (int r = begin; r < begin + ahead; r += warps) {
                if (rows % ahead != 0 && r >= rows) break;
                const unsigned char* row = source.row(first + r);
                const E* from = reinterpret_cast<const E*>(row) + column;
#pragma unroll
                for (int c = lane; c < lane + columns; c += 32)
                    if (columns % 32 == 0 || c < columns) data[r][c] = column + c < end && Source::is_there(row) ? E::widen(from[c]) * sign : Number(0);
            }
    }
};

struct Smem {
    Numbers<cfg::tile_q, chunks * cfg::chunk> q;
    union {
        Numbers<cfg::tile_kv, cfg::chunk> k;
        Numbers<cfg::tile_kv, cfg::v_chunk> v;
    } kv;
    Numbers<cfg::tile_q, cfg::tile_kv> p;
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, false};

__device__ inline Number group_max(Number x) {
#pragma unroll
    for (int d = 1; d < 16; d *= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
__device__ inline Number group_sum(Number x) {
#pragma unroll
    for (int d = 1; d < 16; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

// A thread's rows, keys and columns.
struct Thread {
    const int group = threadIdx.x / 16, lane = threadIdx.x % 16;
    Number s[rows_each][keys_each], o[rows_each][v_chunks * vectors_v][width_v] = {};
    Number top[rows_each], sum[rows_each] = {};  // highest logit of the whole row so far, in units of s; this thread's part

    // The highest logit starts finite, so that a row without a key needs no special case.
    __device__ explicit Thread(const Score& score) {
#pragma unroll
        for (Number& x : top) x = -Limits<Number>::largest / max(Number(1), score.scale_log2);
    }
    __device__ int row(int i) const { return group + groups * i; }

    // s = q k^T, over one chunk of columns after the other. Each is summed apart: what rounding costs grows with the sum's length.
    __device__ void multiply_qk(const Smem& smem, int chunk) {
        Number part[rows_each][keys_each] = {};
#pragma unroll 1
        for (int begin = 0; begin < cfg::chunk; begin += 16)
#pragma unroll
            for (int c = begin; c < begin + 16; c += widest) {
                Vector<Number, widest> q[rows_each], k[keys_each];
#pragma unroll
                for (int i = 0; i < rows_each; ++i) q[i] = smem.q.vector<widest>(row(i), chunk * cfg::chunk + c);
#pragma unroll
                for (int j = 0; j < keys_each; ++j) k[j] = smem.kv.k.vector<widest>(lane + 16 * j, c);
#pragma unroll
                for (int x = 0; x < widest; ++x)
#pragma unroll
                    for (int i = 0; i < rows_each; ++i)
#pragma unroll
                        for (int j = 0; j < keys_each; ++j) part[i][j] += q[i].x[x] * k[j].x[x];
            }
#pragma unroll
        for (int i = 0; i < rows_each; ++i)
#pragma unroll
            for (int j = 0; j < keys_each; ++j) s[i][j] = chunk == 0 ? part[i][j] : s[i][j] + part[i][j];
    }
    // o += p v for one chunk of columns, this tile's keys summed apart, for the same reason.
    __device__ void multiply_pv(const Smem& smem, int chunk) {
        Number part[rows_each][vectors_v][width_v] = {};
#pragma unroll 1
        for (int begin = 0; begin < cfg::tile_kv; begin += 16)
#pragma unroll
            for (int key = begin; key < begin + 16; key += widest) {
                Vector<Number, widest> p[rows_each];
#pragma unroll
                for (int i = 0; i < rows_each; ++i) p[i] = smem.p.vector<widest>(row(i), key);
#pragma unroll
                for (int x = 0; x < widest; ++x)
#pragma unroll
                    for (int c = 0; c < vectors_v; ++c) {
                        const Vector<Number, width_v> v = smem.kv.v.vector<width_v>(key + x, (lane + 16 * c) * width_v);
#pragma unroll
                        for (int i = 0; i < rows_each; ++i)
#pragma unroll
                            for (int y = 0; y < width_v; ++y) part[i][c][y] += p[i].x[x] * v.x[y];
                    }
            }
#pragma unroll
        for (int i = 0; i < rows_each; ++i)
#pragma unroll
            for (int c = 0; c < vectors_v; ++c)
#pragma unroll
                for (int y = 0; y < width_v; ++y) o[i][chunk * vectors_v + c][y] += part[i][c][y];
    }

    // From dot products to logits, -inf where the mask keeps no key.
    __device__ void mask_and_score(const Score& score, const Mask& mask, bool full, i32 q_begin, i32 kv_begin) {
#pragma unroll
        for (int i = 0; i < rows_each; ++i) {
            const i32 q = q_begin + row(i), first = kv_begin + lane;
            const auto kept = mask.row(q, first);
#pragma unroll
            for (int j = 0; j < keys_each; ++j) {
                s[i][j] = score(s[i][j], q, first + 16 * j);
                if (!full && !kept.keep(16 * j)) s[i][j] = Number(minus_inf);
            }
        }
    }
    // smem.p = exp(s - top), as the weights are; o follows the top.
    __device__ void softmax(Smem& smem, const Weight& weight, Number scale_log2, i32 q_begin, i32 kv_begin) {
#pragma unroll
        for (int i = 0; i < rows_each; ++i) {
            Number highest = top[i];
#pragma unroll
            for (int j = 0; j < keys_each; ++j) highest = max(highest, s[i][j]);
            highest = group_max(highest);
            const Number shrink = ptx::exp2((top[i] - highest) * scale_log2);
            top[i] = highest, sum[i] *= shrink;
#pragma unroll
            for (auto& vector : o[i])
#pragma unroll
                for (Number& x : vector) x *= shrink;
#pragma unroll
            for (int j = 0; j < keys_each; ++j) {
                const Number p = ptx::exp2((s[i][j] - highest) * scale_log2);
                sum[i] += p;
                smem.p.data[row(i)][lane + 16 * j] = weight(p, q_begin + row(i), kv_begin + lane + 16 * j);
            }
        }
    }
    __device__ void store(const Store& out, const Softmax& softmax, Number scale_log2, Number factor, i32 q_begin, i32 q_end) const {
#pragma unroll
        for (int i = 0; i < rows_each; ++i) {
            const i32 q = q_begin + row(i);
            LogSum<Number> all{top[i] * (scale_log2 * Number(ln_2)), group_sum(sum[i])};
            softmax.finish(q, all);
            if (q >= q_end) continue;
            const Number inverse = all.inverse() * factor;
            if (lane == 0) out.lse(q, fma(log2(all.total), Number(ln_2), all.reference));  // each row's in the same way
#pragma unroll
            for (int c = 0; c < v_chunks * vectors_v; ++c)
#pragma unroll
                for (int y = 0; y < width_v; ++y) {
                    const int column = c / vectors_v * cfg::v_chunk + (c % vectors_v * 16 + lane) * width_v + y;
                    if (column < cfg::head_dim_v) narrow(out.o(q)[column], o[i][c][y] * inverse);
                }
        }
    }
};

__device__ void attend(const Args& args, Smem& smem, const WorkTile& work) {
    const Rows rows(args, work.batch);
    const Mask mask(args, rows, work);
    const Score score(args, rows, work);
    const Weight weight(args, rows, work);
    const Kv kv(args, rows, work);
    Walk walk(mask, rows, work, work.q_begin, cfg::tile_q);
    if (walk.more())
        smem.q.load<QElement>(rows_upto(args.q, rows.q, work.head, rows.q_len - 1), work.q_begin, 0, cfg::head_dim, cfg::q_sign);
    Thread thread(score);
#pragma unroll 1
    for (; walk.more(); walk.advance()) {
        const i32 first = walk.tile() * cfg::tile_kv;
#pragma unroll
        for (int chunk = 0; chunk < chunks; ++chunk) {
            smem.kv.k.load<KvElement>(kv.k(), first, chunk * cfg::chunk, cfg::head_dim);
            __syncthreads();
            thread.multiply_qk(smem, chunk);
            __syncthreads();
        }
        thread.mask_and_score(score, mask, walk.is_full(), work.q_begin, first);
        thread.softmax(smem, weight, score.scale_log2, work.q_begin, first);
#pragma unroll
        for (int chunk = 0; chunk < v_chunks; ++chunk) {
            smem.kv.v.load<KvElement>(kv.v(), first, chunk * cfg::v_chunk, cfg::head_dim_v);
            __syncthreads();
            thread.multiply_pv(smem, chunk);
            __syncthreads();
        }
    }
    const Softmax softmax(args, rows, work, score.scale_log2);
    thread.store(Store(args, rows, work), softmax, score.scale_log2, Weight::factor(args), work.q_begin, rows.q_len);
}

extern "C" __global__ __launch_bounds__(cfg::threads, cfg::ctas_per_sm) void attn_fwd_simt(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) attend(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
