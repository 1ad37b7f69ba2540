// Folds the states of splits that the blocks of attn_decode.cu have left (tile/pieces.cuh): a launch behind it, of as many blocks times
// pairs of rows. A block finds out from the lengths, as those blocks have, which work it is that one of them begins and others go on with,
// and where its states are. This it does while they compute: then all that is left is to fetch, fold and store two rows.
//
// Who changes lengths meanwhile gets results that are undefined, but lie in their memory.

#include "config.cuh"  // rendered: cfg, Args, and the options
                       // Element, QElement, KvElement, OElement, Rows, Mask, Score, Softmax, Walk, Scheduler, Store, Launch
#include "ptx/barrier.cuh"
#include "tile/facts.cuh"
#include "tile/fold.cuh"
#include "tile/store_state.cuh"
#include "variant/interfaces.cuh"

struct Smem {
    struct Work {
        SplitRun run;
        i32 rows;
    } work;
    alignas(16) i32 pieces[2][cfg::most_pieces];  // none, and those of the work
    QuadFactors<1> factors;
};
template struct RowsOption<Rows>;
template struct MaskOption<Mask>;
template struct ScoreOption<Score>;
template struct SumOption<Softmax>;
template struct SplitWalkOption<Walk, Mask>;
template struct SharesOption<Scheduler>;
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

// By a warp: the work whose first splits are in the share of the block's namesake, if that has not all of it, and where its states are.
__device__ void find(const Args& args, Smem& smem) {
    Scheduler scheduler(args, nullptr);
    if (threadIdx.x == 0) smem.work.rows = 0;
    while (true) {
        const auto [run, rows] = scheduler.next(args);
        if (run.is_last()) return;
        if (run.split > run.splits.begin || run.is_whole()) continue;
        if (threadIdx.x == 0) smem.work = {run, min(cfg::tile_q, rows.q_len - run.q_begin)};
        struct {
            i32 (&pieces)[cfg::most_pieces];
        } to{smem.pieces[1]};
        return list_pieces(args, to, scheduler.line, run);
    }
}

extern "C" __global__ __launch_bounds__(cfg::threads) void fold_pieces(const __grid_constant__ Args args) {
    extern __shared__ __align__(1024) unsigned char raw[];
    Smem& smem = *reinterpret_cast<Smem*>(raw);
    Launch::launch_dependents();
    ptx::launch_in_front_has_waited();  // for lengths
    for (u32 i = threadIdx.x; i < cfg::most_pieces; i += cfg::threads) smem.pieces[0][i] = -1;
    if (threadIdx.x < 32) find(args, smem);
    __syncthreads();
    const StateStore<Pair> pair(args, smem, blockIdx.x / work_blocks(args));
    if (blockIdx.x > 0 && pair.rows() <= 0) return;  // one block waits in any case: the launch behind waits for this one
    // Nothing is folded first: then instructions are there when states are.
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        if (turn == 1) Launch::wait();
        if (pair.rows() <= 0) continue;
        const SplitRun& run = smem.work.run;
        const float scale_log2 = Score(args, Rows(args, run.batch), run).scale_log2;
        const PieceFold<StateStore<Pair>, QuadFactors<1>, cfg::threads> fold{pair, smem.pieces[turn], smem.factors};
        fold.run(run.splits, min(2, pair.rows()), scale_log2, [&](const FloatState& state, i32 lane, i32 column) {
            if (turn == 1) pair.store(state, i32(4 * pair.quad) + lane, column, scale_log2);
        });
    }
}
