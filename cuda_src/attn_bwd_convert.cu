// Last pass of the backward where attn_bwd.cu leaves sums: dq = scale times the sum, from accumulator fragments to rows.
//
// A block converts a tile of cfg::tile_q rows of one head, a warpgroup each of cfg::dq_parts parts of its columns. A tile whose
// rows keep no key has no sum: its dq is 0.

#include "config.cuh"  // rendered: cfg, StridedOutput, Args, and the choices Element, Rows, Mask, Scheduler
#include "tile/facts.cuh"
#include "variant/interfaces_bwd.cuh"
#include "variant/store/rows.cuh"

template struct ElementOption<Element>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct SchedulerOption<Scheduler>;

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, true};

constexpr int accumulators = cfg::dq_columns / 2;
static_assert(cfg::tile_q == 64 && cfg::threads == 128 * cfg::dq_parts);

__device__ void convert(const Args& args, const WorkTile& work) {
    const Rows rows(args, work.batch);
    if (work.q_begin >= rows.q_len) return;
    const TileRange tiles = Mask(args, rows, work).kv_tiles(work.q_begin, min(work.q_begin + cfg::tile_q, rows.q_len));
    const i32 place = place_of(args, rows, work.head, work.q_begin / cfg::tile_q);
    const u32 part = threadIdx.x / 128, lane = threadIdx.x % 128;
    const i64 first = (i64(place) * cfg::dq_parts + part) * (accumulators * 32);
    const float4* sum = reinterpret_cast<const float4*>(args.dq_sum) + first + lane;
    float x[accumulators];
#pragma unroll
    for (int i = 0; i < accumulators; i += 4) {
        const float4 y = tiles.begin < tiles.end ? sum[i * 32] : float4{};
        x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
    unsigned char* to = args.dq.rows(rows.q, work.head) + part * (cfg::dq_columns * sizeof(Element));
    const i32 row = work.q_begin + lane / 32 * 16 + lane % 32 / 4, columns = cfg::head_dim - i32(part) * cfg::dq_columns;
    store_rows(to, args.dq.row_bytes, row, rows.q_len, columns, x, args.scale * cfg::scale_sign);
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_convert(const __grid_constant__ Args args) {
    ptx::griddepcontrol_wait();
    ptx::launch_dependents();
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) convert(args, work);
    scheduler.finish();
}
