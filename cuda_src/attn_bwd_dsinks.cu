// A pass of the backward where heads have sinks: dsink = -sum over a head's rows of exp(sink - lse) delta. A sink is a key that no
// row has a value of: its weight is exp(sink - lse), and its dp is 0.
//
// A block adds up one head, each warp every so many chunks of 32 rows, counted through all sequences, a lane a row; then lanes and
// warps are added in one order. So the same lengths give the same bits.
//
//   barrier         arrives        waits          protects
//   __syncthreads   every thread   every thread   smem.sums until read

#include "config.cuh"  // rendered: cfg, Args, and the choices Element, Rows, Mask, Statistics, Launch
#include "tile/facts.cuh"
#include "tile/range.cuh"
#include "variant/interfaces_bwd.cuh"

template struct NumberOption<Element>;
template struct RowsOption<Rows>;
template struct QBlocksOption<Rows>;
template struct LaunchOption<Launch>;

constexpr i32 warps = cfg::threads / 32;
static_assert(cfg::threads % 32 == 0 && warps <= 32 && cfg::q_block == cfg::tile_q);

struct Smem {
    Number sums[warps];
};

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

// This thread's rows.
__device__ Number add_rows(const Args& args, i32 head) {
    const Number sink = args.sinks[head];
    Number sum = 0;
    i32 chunk = threadIdx.x / 32;
    for (i32 batch = 0; batch < args.batches; ++batch) {
        const Rows rows(args, batch);
        if (rows.is_cut) break;  // other passes leave out the rest, too
        const i32 chunks = ceil_div(rows.q_len, 32);
        const Number* delta = args.delta + i64(place_of(args, rows, head, 0)) * cfg::tile_q;
        for (; chunk < chunks; chunk += warps) {
            const i32 row = chunk * 32 + threadIdx.x % 32;
            if (row >= rows.q_len) continue;
            const Number lse = args.lse[rows.lse_offset(args, row, head)];
            const Number p = lse == sink ? Number(1) : ptx::exp2((sink - lse) * Number(log2_e));  // 1 where both are inf
            sum -= p * delta[Statistics::place(row)];
        }
        chunk -= chunks;
    }
    return sum;
}
__device__ inline Number add_lanes(Number x) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

extern "C" __global__ __launch_bounds__(cfg::threads) void attn_bwd_dsinks(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    Launch::wait();
    Launch::launch_dependents();
    const i32 head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Number sum = add_lanes(add_rows(args, head));
    if (lane == 0) smem.sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    const Number all = add_lanes(lane < warps ? smem.sums[lane] : Number(0));
    if (lane == 0) args.dsinks[head] = all;
}
