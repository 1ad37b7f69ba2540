// Folds the states that attn_decode_wide.cu left of works which several blocks had parts of, from left to right: the same sums, product by
// product, that a block makes which has all splits of a work.
//
// A warp folds some columns of a strip, 16 rows, of one such work, so that all multiprocessors share it. A lane brings its own numbers of
// all states to shared memory at once, and reads them there itself.
//
//   barrier          arrives        waits          protects
//   __syncthreads    all threads    all threads    smem.cut; then .border
//
// Who changes lengths while blocks of the launch before look at them tears it: a share does not begin where the one before ends.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Rows, Score, Softmax, Store, Launch
#include "ptx/cp_async.cuh"
#include "tile/cut_work.cuh"
#include "tile/facts.cuh"
#include "tile/softmax.cuh"
#include "tile/violated.cuh"
#include "variant/interfaces.cuh"

constexpr int columns = 2;  // a fragment's blocks that a warp folds
constexpr int states = 16;  // brought at once
constexpr int warps = cfg::threads / 32;
static_assert(blocks % columns == 0 && cfg::most_blocks <= cfg::threads);

struct State { float4 o[columns][32], stats[32]; };
struct Smem {
    State state[warps][states];
    u32 cut[warps];          // bits: at which borders works are cut
    i32 border[cfg::threads];  // these, in order
};
template struct ElementOption<Element>;
template struct RowsOption<Rows>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

// Columns of o from some block on, and with the first of them the logarithms.
struct StoreColumns : Store {
    const i32 block, first;  // this thread's upper row
    OElement* to[2];         // where its rows lie, once they are found

    __device__ void find() { to[0] = Store::o(first) + block * 8, to[1] = Store::o(first + 8) + block * 8; }
    __device__ OElement* o(i32 row) const { return to[(row - first) / 8]; }
    __device__ void lse(i32 row, Number x) const {
        if (block == 0) Store::lse(row, x);
    }
};

__device__ void fold(const Args& args, State (&state)[states], i32 border, i32 strip, i32 block) {
    const Left& left = args.left[border];
    if (strip * 16 >= left.rows) return;
    const WorkTile work{left.batch, left.head, left.q_begin, 0};
    const i32 lane = threadIdx.x % 32, count = max(1, 1 + left.splits - left.owned);  // fewer where lengths were torn
    const Rows rows(args, work.batch);
    const float scale_log2 = Score(args, rows, work).scale_log2;
    StoreColumns store{{args, rows, work}, block, work.q_begin + strip * 16 + lane / 4, {}};
    MaxSum found;
    float sum[4 * columns];
#pragma unroll
    for (float& x : sum) x = -0.f;  // to which -0 may be added
#pragma unroll 1
    for (i32 first = 0; first < count; first += states) {
        const i32 here = min(states, count - first);
#pragma unroll 1
        for (i32 i = 0; i < here; ++i) {
            const float4* const from = state_at(args, border, first + i ? count - first - i : 0, strip);
            ptx::cp_async(ptx::smem_address(&state[i].stats[lane]), from + blocks * 32 + lane / 4);
#pragma unroll
            for (int c = 0; c < columns; ++c) ptx::cp_async(ptx::smem_address(&state[i].o[c][lane]), from + (block + c) * 32 + lane);
        }
        ptx::cp_async_commit();
        if (first == 0) store.find();  // while states are on their way
        ptx::cp_async_wait<0>();
        if (first == 0) found.set(state[0].stats[lane]), found.sum[0] = found.sum[1] = -0.f;  // nothing yet, by a factor of 1
#pragma unroll 2
        for (i32 i = 0; i < here; ++i) {
            MaxSum next;
            next.set(state[i].stats[lane]);
            const Factors by = found.factors(next, scale_log2);
            found.fold(next, by);
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                const float4 x = state[i].o[c][lane];
                sum[4 * c] = by.fold(sum[4 * c], x.x, 0), sum[4 * c + 1] = by.fold(sum[4 * c + 1], x.y, 0);
                sum[4 * c + 2] = by.fold(sum[4 * c + 2], x.z, 1), sum[4 * c + 3] = by.fold(sum[4 * c + 3], x.w, 1);
            }
        }
    }
    store_strip(store, args, rows, work, store.first, found, sum, scale_log2);
}

// Lists the borders at which works are cut; says how many they are.
__device__ i32 list_cut(const Args& args, Smem& smem) {
    const u32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const bool is_cut = i32(thread) < args.borders && args.left[thread].splits > 0;
    const u32 cut = __ballot_sync(0xffffffffu, is_cut);
    if (lane == 0) smem.cut[warp] = cut;
    __syncthreads();
    i32 before = 0, all = 0;
#pragma unroll
    for (u32 i = 0; i < warps; ++i) before += i < warp ? __popc(smem.cut[i]) : 0, all += __popc(smem.cut[i]);
    if (is_cut) smem.border[before + __popc(cut & ((1u << lane) - 1))] = thread;
    __syncthreads();
    return all;
}

extern "C" __global__ __launch_bounds__(cfg::threads, 1) void attn_decode_fold(const __grid_constant__ Args args) {
    extern __shared__ __align__(16) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    Launch::launch_dependents();  // the next launch waits for this one, which waits: it may come to multiprocessors that are free
    Launch::wait();
    const i32 warp = threadIdx.x / 32, chunks = blocks / columns, each = args.strips * chunks, units = list_cut(args, smem) * each;
#pragma unroll 1
    for (i32 unit = warp * gridDim.x + blockIdx.x; unit < units; unit += gridDim.x * warps)  // neighbours go to other multiprocessors
        fold(args, smem.state[warp], smem.border[unit / each], unit % each / chunks, unit % each % chunks * columns);
    const i32 border = blockIdx.x + 1 < gridDim.x ? args.borders : i32(threadIdx.x);  // one block looks
    if (border < args.borders && args.left[border].end != args.left[border + 1].begin) atomicOr(args.violations, violated::torn);
}
