// Last pass of the backward where attn_bwd.cu or attn_bwd_mma.cu leaves sums: dq = scale times the sum, from accumulators to rows.
//
// A block converts a tile of cfg::tile_q rows of one head, as many warps as it has 16 rows each of cfg::dq_parts parts of its columns.
// A tile whose rows keep no key has no sum: its dq is 0. Where it has several, they are added in order.

#include "config.cuh"  // rendered: cfg, StridedOutput, Args, and the options Element, Rows, Mask, Sum, DqRows, Launch, Scheduler
#include "tile/facts.cuh"
#include "tile/number.cuh"
#include "variant/interfaces_bwd.cuh"

template struct RowsStoreOption<DqRows>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct LaunchOption<Launch>;
template struct SchedulerOption<Scheduler>;

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

constexpr int accumulators = cfg::dq_columns / 2, lanes = 2 * cfg::tile_q;
static_assert(cfg::tile_q % 16 == 0 && cfg::threads == lanes * cfg::dq_parts);
static_assert(cfg::dq_vector == 4 || cfg::dq_vector == 1);  // of a lane's numbers on end

__device__ void convert(const Args& args, const WorkTile& work) {
    const Rows rows(args, work.batch);
    if (work.q_begin >= rows.q_len) return;
    const i32 place = place_of(args, rows, work.head, work.q_begin / cfg::tile_q);
    const bool has_sum = Sum::is_there(args, rows, Mask(args, rows, work), work, place);
    const u32 part = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    using Sums = Vector<float, cfg::dq_vector>;
    const Sums* sum = reinterpret_cast<const Sums*>(args.dq_sum + (i64(place) * cfg::dq_parts + part) * (accumulators * lanes)) + lane;
    float x[accumulators];
#pragma unroll
    for (int i = 0; i < accumulators; i += cfg::dq_vector) {
        const Sums y = has_sum ? sum[i / cfg::dq_vector * lanes] : Sums{};
#pragma unroll
        for (int j = 0; j < cfg::dq_vector; ++j) x[i + j] = y.x[j];
    }
    Sum::add_others(args, rows, Mask(args, rows, work), work, [&](i32 n) {
        const Sums* other = sum + i64(n) * (args.heads * args.q_blocks) * (cfg::threads * accumulators / cfg::dq_vector);
#pragma unroll
        for (int i = 0; i < accumulators; ++i) x[i] += other[i / cfg::dq_vector * lanes].x[i % cfg::dq_vector];
    });
    unsigned char* to = args.dq.rows(rows.q, work.head) + part * (cfg::dq_columns * sizeof(QElement));
    const i32 row = work.q_begin + lane / 32 * 16 + lane % 32 / 4, columns = cfg::head_dim - i32(part) * cfg::dq_columns;
    DqRows::store(to, args.dq.row_bytes, row, rows.q_len, columns, x, args.scale * cfg::scale_sign);
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_convert(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) convert(args, work);
    scheduler.finish();
}
