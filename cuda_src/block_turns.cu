// In which order key tiles add to dq where lists of blocks say which do: as they come to it, if all steps take as long. Works that are begun
// together walk along lists of their own, so that in the order of key tiles a chain of waits would go through all of them.
//
// A step's time is that of its work (block_starts.cu) and the steps of the work before it. A block of attn_bwd.cu makes its steps in the order
// of their times, and a step waits for earlier ones alone, or for later key tiles' of the same time: none waits for ever while all blocks run.
//
// A thread block has one list (block_steps.cu, block_lists.cu), of which each number finds its place and time, and then its turn among all.
//
//   barrier           arrives        waits          protects
//   __syncthreads     every thread   every thread   turn and nth of the list's steps, now place and time, until all are there

#include "config.cuh"  // rendered: cfg, Args, and the options Element, Launch
#include "tile/facts.cuh"
#include "variant/lists/block_step.cuh"

extern "C" __device__ Facts facts = {0, sizeof(Args), cfg::threads, Launch::uses_pdl};

struct Turns {
    const Args& args;
    const i32 list, group = list / args.listed_blocks, block = list % args.listed_blocks, kv_head = group / args.heads_per_kv;
    ListedStep* const steps = reinterpret_cast<ListedStep*>(args.listed_steps) + i64(list) * args.listed;
    TileStep* const sorted = reinterpret_cast<TileStep*>(args.tile_steps) + i64(group) * args.listed_blocks * args.listed;

    __device__ const i32* begins(i32 head, i32 tile) const { return args.tile_begins + i64(head) * (args.listed_tiles + 1) + tile; }
    // The first step of the list among those of a key tile.
    __device__ i32 find(i32 begin, i32 end) const {
        while (begin < end) {
            const i32 middle = (begin + end) / 2;
            if (sorted[middle].block() < block) begin = middle + 1;
            else end = middle;
        }
        return begin;
    }
    __device__ void find_times() const {
        for (i32 i = threadIdx.x; i < args.listed; i += cfg::threads) {
            const ListedStep step = steps[i];
            if (step.tile < 0) continue;
            const i32* const own = begins(group, step.tile);
            const i32 place = find(own[0], own[1]) + step.nth;
            i32 time = args.work_starts[i64(kv_head) * args.listed_tiles + step.tile] + place - own[0];
            for (i32 head = kv_head * args.heads_per_kv; head < group; ++head) time += begins(head, step.tile)[1] - begins(head, step.tile)[0];
            steps[i].turn = place, steps[i].nth = time;
        }
        __syncthreads();
    }
    __device__ void store_turns() const {
        for (i32 i = threadIdx.x; i < args.listed; i += cfg::threads) {
            const ListedStep own = steps[i];
            if (own.tile < 0) continue;
            i32 before = 0;
#pragma unroll 4
            for (i32 j = 0; j < args.listed; ++j) {
                const ListedStep other = steps[j];
                before += other.tile >= 0 && (other.nth < own.nth || (other.nth == own.nth && other.tile > own.tile));
            }
            sorted[own.turn].turn = before;
        }
    }
};

extern "C" __global__ __launch_bounds__(cfg::threads) void block_turns(const __grid_constant__ Args args) {
    Launch::wait();
    Launch::launch_dependents();
    const Turns turns{args, i32(blockIdx.x)};
    turns.find_times();
    turns.store_turns();
}
