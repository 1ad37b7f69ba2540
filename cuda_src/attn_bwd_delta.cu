// First pass of the backward: for each query row, delta = sum_d do o - dlse, and lse in units of log2.
//
// A block computes a tile of cfg::tile_q rows of one head, cfg::lanes threads a row. Both statistics go to scratch that holds whole
// blocks of rows: (heads, blocks of all sequences, cfg::q_block), where a block is such a tile. Rows past a sequence's end and rows
// that keep no key have lse = +inf and delta = 0, so that p = exp2(s - inf) = 0 and ds = p (dp - 0) = 0 with no case for them. Clear
// brings what the next passes want cleared.

#include "config.cuh"  // rendered: cfg, StridedTensor, Args, and the options Element, Rows, Mask, Dlse, Turn, Clear, Statistics,
                       // Launch, Scheduler
#include "tile/facts.cuh"
#include "tile/number.cuh"
#include "tile/strided_tensor.cuh"
#include "variant/interfaces_bwd.cuh"

template struct NumberOption<OElement>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct MaskOption<Mask>;
template struct DlseOption<Dlse>;
template struct ClearOption<Clear>;
template struct LaunchOption<Launch>;
template struct SchedulerOption<Scheduler>;

struct Smem {
    Number sums[cfg::tile_q];
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

constexpr int rows_at_once = cfg::threads / cfg::lanes, vectors = (cfg::head_dim_v + cfg::vector - 1) / cfg::vector;
static_assert(cfg::q_block == cfg::tile_q && cfg::threads % 32 == 0 && 32 % cfg::lanes == 0 && cfg::tile_q % rows_at_once == 0);

using Part = Vector<OElement, cfg::vector>;

// A lane's part of the sum over a row's columns.
__device__ inline Number part_of(const unsigned char* o, const unsigned char* d_o, int lane) {
    Number sum = 0;
#pragma unroll 1
    for (int first = 0; first < vectors; first += cfg::lanes) {
        if (vectors % cfg::lanes != 0 && first + lane >= vectors) break;
        const Part a = reinterpret_cast<const Part*>(o)[first + lane], b = reinterpret_cast<const Part*>(d_o)[first + lane];
#pragma unroll
        for (int i = 0; i < cfg::vector; ++i) sum += OElement::widen(a.x[i]) * OElement::widen(b.x[i]);
    }
    return sum;
}

// The sums of a tile's rows, for the threads that store them.
__device__ void reduce(const Args& args, const Rows& rows, const WorkTile& work, Number (&sums)[cfg::tile_q]) {
    const AnyMatrix o = any_matrix_of(args.o, rows.q, work.head), d_o = any_matrix_of(args.d_o, rows.q, work.head);
    const int lane = threadIdx.x % cfg::lanes, first = threadIdx.x / cfg::lanes;
    Number sum[cfg::tile_q / rows_at_once];  // all loads are on their way before the first is awaited: rows past the end are the last
#pragma unroll
    for (int i = 0; i < cfg::tile_q / rows_at_once; ++i) {
        const i32 row = min(work.q_begin + first + i * rows_at_once, rows.q_len - 1);
        sum[i] = part_of(o.row(row), d_o.row(row), lane);
    }
#pragma unroll
    for (int i = 0; i < cfg::tile_q / rows_at_once; ++i) {
#pragma unroll
        for (int d = cfg::lanes / 2; d > 0; d /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], d);
        if (lane == 0) sums[first + i * rows_at_once] = sum[i];
    }
}

__device__ void compute(const Args& args, Smem& smem, const WorkTile& work) {
    const Rows rows(args, work.batch);
    if (work.q_begin >= rows.q_len) return;
    const i32 place = place_of(args, rows, work.head, work.q_begin / cfg::tile_q);
    reduce(args, rows, work, smem.sums);
    __syncthreads();
#pragma unroll 1
    for (int r = threadIdx.x; r < cfg::tile_q; r += cfg::threads) {
        const i32 row = work.q_begin + r;
        const Number lse = row < rows.q_len ? args.lse[rows.lse_offset(args, row, work.head)] : Number(minus_inf);
        const bool kept = lse != Number(minus_inf);
        const i64 to = i64(place) * cfg::tile_q + Statistics::place(r);
        args.lse_log2[to] = kept ? lse * Number(log2_e) : -Number(minus_inf);
        args.delta[to] = kept ? smem.sums[r] - Dlse::of(args, rows, row, work.head) : Number(0);
    }
    Clear::clear(args, rows, Mask(args, rows, work), work, place);
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_delta(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Launch::wait();
    Launch::launch_dependents();
    Scheduler scheduler(args);
    const WorkTile work = scheduler.next();
    if (!work.is_last()) compute(args, *reinterpret_cast<Smem*>(raw), work);
    scheduler.finish();
}
