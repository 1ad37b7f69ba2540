#pragma once
// Packed sequences: one sequence after the other, in each the last query tiles first, all heads of a tile together. A warp finds
// the sequence of its number by counting query tiles, 32 sequences at a time; numbers grow, so it goes on from the last one's.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

template <class Numbers>
struct LptVarlenScheduler {
    const Args& args;
    Numbers numbers{};
    i32 base = 0, before = 0;  // first sequence of the 32 at hand, query tiles of all before it

    __device__ explicit LptVarlenScheduler(const Args& args) : args(args) {}

    __device__ WorkTile next() {
        const i32 id = numbers.draw(args), tile = id / args.heads, lane = threadIdx.x % 32;
        for (; base < args.batches; base += 32) {
            const i32 batch = base + lane;
            const i32 count = batch < args.batches ? ceil_div(max(0, Rows(args, batch).q_len), cfg::tile_q) : 0;
            i32 end = before + count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, end, d);
                if (lane >= d) end += lower - before;
            }
            const u32 in_order = Rows::lanes_in_order(args, batch), past = __ballot_sync(0xffffffffu, end > tile) & in_order;
            if (past) {
                const i32 owner = __ffs(past) - 1, last = __shfl_sync(0xffffffffu, end, owner);
                return {base + owner, id % args.heads, (last - 1 - tile) * cfg::tile_q, numbers.split};
            }
            if (in_order != ~0u) break;
            before = __shfl_sync(0xffffffffu, end, 31);
        }
        return {-1, 0, 0, 0};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
