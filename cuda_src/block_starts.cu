// When each work over lists of blocks begins, where key tiles add to dq in the order of time (block_turns.cu): the steps that its block of
// attn_bwd.cu has before. Those of the first works begin at different times, as if they had been at work before, or all would come to a
// head's first query tiles at once. A step is one of a block of queries.
//
// A thread block has the works of the block of attn_bwd.cu with its number. No thread waits for another, so there is no barrier.

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Rows, Scheduler, Launch
#include "tile/facts.cuh"
#include "variant/interfaces.cuh"
#include "variant/kv_work_tile.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

__device__ i32 count_steps(const Args& args, const KvWorkTile& work) {
    i32 steps = 0;
    for (i32 h = 0; h < args.heads_per_kv; ++h) {
        const i64 group = work.batch * args.heads + work.kv_head * args.heads_per_kv + h;
        const i32* const begins = args.tile_begins + group * (args.listed_tiles + 1) + work.kv_tile;
        steps += begins[1] - begins[0];
    }
    return steps;
}

extern "C" __global__ __launch_bounds__(cfg::threads) void block_starts(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    Scheduler scheduler(args);
    i32 time = -1;
    for (KvWorkTile work = scheduler.next(); !work.is_last(); work = scheduler.next()) {
        const i32 steps = count_steps(args, work), head = work.batch * (args.heads / args.heads_per_kv) + work.kv_head;
        if (time < 0) time = i32(i64(steps) * blockIdx.x / gridDim.x);
        if (threadIdx.x == 0) args.work_starts[i64(head) * args.listed_tiles + work.kv_tile] = time;
        time += steps;
    }
    scheduler.finish();
}
