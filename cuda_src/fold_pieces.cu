// Folds the states of splits that the blocks of attn_decode.cu have left (tile/pieces.cuh), in a launch behind it. Those have said which
// works they cut: a block folds two rows of one at a time. Before all it folds nothing, so that instructions are there when states are.
//
// Who changes lengths while the launch before looks at them tears it: that is said, and what is computed then lies in its memory.

#include "config.cuh"  // rendered: cfg, Args, and the options
                       // Element, QElement, KvElement, OElement, Rows, Score, Softmax, Store, Launch
#include "ptx/barrier.cuh"
#include "tile/facts.cuh"
#include "tile/fold.cuh"
#include "tile/share.cuh"
#include "tile/store_state.cuh"
#include "variant/interfaces.cuh"

struct Work {
    WorkTile run;
    i32 rows;
    Splits splits;
    static constexpr i64 at = 0;
};
struct Smem {
    Work work;
    i32 until[cfg::most_blocks];  // of the blocks that have parts of the work: the splits behind each one's
    alignas(16) i32 pieces[cfg::most_pieces];
    QuadFactors<1> factors;
};
template struct RowsOption<Rows>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct StoreOption<Store>;
template struct LaunchOption<Launch>;

extern "C" __device__ Facts facts = {sizeof(Smem), sizeof(Args), cfg::threads, Launch::uses_pdl};

// All threads of a block, which have two rows of a work.
struct Pair {
    const Args& args;
    const Smem& smem;
    const u32 m, quad;

    __device__ Pair(const Args& args, const Smem& smem, u32 index) : args(args), smem(smem), m(index / 8), quad(index % 8) {}

    __device__ static u32 thread() { return threadIdx.x; }
    __device__ static void meet_strands() { ptx::bar_sync(1, cfg::threads); }
    __device__ i32 rows() const { return smem.work.rows - i32(16 * m + 2 * quad); }
    // A state's part: the lanes and the maxima of the pair alone.
    struct Slot : StateSlot {
        u32 quad;

        __device__ const float4* o(int i, u32 thread) const { return StateSlot::o(i, thread + 4 * quad); }
        __device__ const float4* max_sum(u32) const { return StateSlot::max_sum(4 * quad); }
    };
    __device__ Slot slot(i32 at) const {
        return {{reinterpret_cast<float4*>(args.partials) + i64(at) * StateSlot::stride + m * (StateSlot::stride / cfg::m_tiles)}, quad};
    }
};

// Whose shares the parts of a work are: what list_pieces asks of a line.
struct Parts {
    const Smem& smem;
    i32 first, count;  // blocks

    __device__ i32 first_split(const Splits& splits, i64, i32 block) const { return block > first ? smem.until[block - first - 1] : splits.begin; }
    __device__ i32 owner(const Splits&, i64, i32 split) const {
        i32 before = 0;
#pragma unroll 1
        for (i32 step = cfg::most_blocks / 2; step > 0; step /= 2)
            if (before + step < count && smem.until[before + step - 1] <= split) before += step;
        return first + before;
    }
};

// By a warp: the work that a block begins and others go on with, and where its states are; one of no rows where there is none.
__device__ void find(const Args& args, Smem& smem, i32 first) {
    const Left left = args.left[first];
    if (threadIdx.x == 0) smem.work.rows = 0;
    if (left.splits == 0) return;
    const i32 begin = left.end.split - left.owned, end = begin + left.splits, lane = threadIdx.x;
    i32 count = 0;
    for (bool is_last = false; !is_last; count += 32) {
        const i32 block = first + count + lane;
        const Share share = block < args.blocks_before ? args.left[block].end : Share{-1, 0, 0};
        const i32 until = share.batch == left.batch && share.work == left.end.work ? share.split : end;
        if (block < args.blocks_before) smem.until[block - first] = until;
        is_last = __any_sync(0xffffffffu, until == end);
    }
    const Work work{{left.batch, left.head, left.q_begin, begin}, left.rows, {begin, end}};
    if (lane == 0) smem.work = work;
    __syncwarp();
    list_pieces(args, smem, Parts{smem, first, min(count, args.blocks_before - first)}, work);
}

extern "C" __global__ __launch_bounds__(cfg::threads) void fold_pieces(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    Launch::launch_dependents();
    ptx::launch_in_front_has_waited();  // for lengths
    for (u32 i = threadIdx.x; i < cfg::most_pieces; i += cfg::threads) smem.pieces[i] = -1;
    if (threadIdx.x == 0) smem.work = {{0, 0, 0, 0}, 2, {0, 1}};
#pragma unroll 1
    for (i32 unit = i32(blockIdx.x) - i32(gridDim.x); unit < args.blocks_before * args.pairs; unit += gridDim.x) {
        if (unit >= 0 && threadIdx.x < 32) find(args, smem, unit % args.blocks_before);
        __syncthreads();
        const StateStore<Pair> pair(args, smem, max(0, unit / args.blocks_before));
        if (pair.rows() > 0) {
            const WorkTile& run = smem.work.run;
            const float scale_log2 = Score(args, Rows(args, run.batch), run).scale_log2;
            const PieceFold<StateStore<Pair>, QuadFactors<1>, cfg::threads> fold{pair, smem.pieces, smem.factors};
            fold.run(smem.work.splits, min(2, pair.rows()), scale_log2, [&](const FloatState& state, i32 lane, i32 column) {
                if (unit >= 0) pair.store(state, i32(4 * pair.quad) + lane, column, scale_log2);
            });
        }
        if (unit < 0) Launch::wait();
        __syncthreads();
    }
    if (blockIdx.x + 1 < gridDim.x) return;  // one block looks
    for (i32 block = threadIdx.x; block + 1 < args.blocks_before; block += cfg::threads)
        if (args.left[block].end != args.left[block + 1].begin) atomicOr(args.violations, violated::torn);
}
