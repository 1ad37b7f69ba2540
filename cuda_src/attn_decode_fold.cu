// Folds the states that attn_decode_wide.cu left of works which several blocks had parts of, in the order that SplitFold says: the same
// sums, product by product, that a block makes which has all splits of a work.
//
// A warp folds some columns of a strip, 16 rows, of one such work, so that all multiprocessors share it. A lane brings its own numbers of
// all states to shared memory at once, and reads them there itself.
//
//   barrier          arrives        waits          protects
//   __syncthreads    all threads    all threads    smem.cut; then .border
//
// Who changes lengths while blocks of the launch before look at them tears it: a share does not begin where the one before ends.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Rows, Score, Softmax, Store, Launch, SplitFold
#include "tile/cut_work.cuh"
#include "tile/facts.cuh"
#include "tile/softmax.cuh"
#include "tile/violated.cuh"
#include "variant/interfaces.cuh"

constexpr int columns = 2;  // a fragment's blocks that a warp folds
constexpr int warps = cfg::threads / 32;
static_assert(blocks % columns == 0 && cfg::most_blocks <= cfg::threads);

struct Smem {
    SplitFold::Room<columns> room[warps];
    u32 cut[warps];          // bits: at which borders works are cut
    i32 border[cfg::threads];  // these, in order
};
template struct ElementOption<Element>;
template struct RowsOption<Rows>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;
template struct StatesFoldOption<SplitFold, columns>;

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

__device__ void fold(const Args& args, SplitFold::Room<columns>& room, i32 border, i32 strip, i32 block) {
    const Left& left = args.left[border];
    if (strip * 16 >= left.rows) return;
    const WorkTile work{left.batch, left.head, left.q_begin, 0};
    const i32 lane = threadIdx.x % 32;
    const SplitFold::Pieces pieces(args, left, border);
    const Rows rows(args, work.batch);
    const float scale_log2 = Score(args, rows, work).scale_log2;
    StoreColumns store{{args, rows, work}, block, work.q_begin + strip * 16 + lane / 4, {}};
    MaxSum found;
    float sum[4 * columns];
#pragma unroll
    for (float& x : sum) x = -0.f;  // to which -0 may be added
    SplitFold::fold_states<columns>(args, room, pieces, border, strip, block, lane, scale_log2, found, sum, [&] { store.find(); });
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
        fold(args, smem.room[warp], smem.border[unit / each], unit % each / chunks, unit % each % chunks * columns);
    const i32 border = blockIdx.x + 1 < gridDim.x ? args.borders : i32(threadIdx.x);  // one block looks
    if (border < args.borders && args.left[border].end != args.left[border + 1].begin) atomicOr(args.violations, violated::torn);
}
