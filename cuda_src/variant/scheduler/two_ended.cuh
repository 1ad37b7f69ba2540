#pragma once
// Packed sequences from both ends, for blocks that stay: half of them take works from the front, the other half from the back, until
// they meet. So where sequences that decode stand before a prompt, or behind it, one half reads their keys at the speed of memory, while
// the other computes the prompt's tiles at that of the tensor cores. In each sequence the last query tiles come first, all heads of a
// tile together, whichever half takes them.
//
// Both halves draw from one counter, which has the works taken from the front in its lower half and those from the back in its upper
// one. A draw sees both, so it knows how many works of its sequence were taken before, by either half, and whether any was left.
// The last block to finish resets the counter.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

struct TwoEndedScheduler {
    const Args& args;
    // A lane has what the warp remembers, since a producer has few registers: in lane 0 the first sequence of the 32 at hand, counted
    // from the block's end, in lane 1 the tiles of all before it, in lane 2 those of all sequences, of a head each.
    i32 kept = 0;
    i32 own = blockIdx.x;  // -1 once it is taken

    __device__ explicit TwoEndedScheduler(const Args& args) : args(args) {
        i32 tiles = 0;
#pragma unroll 4
        for (i32 batch = threadIdx.x % 32; batch < args.batches; batch += 32) tiles += tiles_of(batch);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) tiles += __shfl_xor_sync(0xffffffffu, tiles, d);
        keep(2, tiles);
    }
    __device__ i32 tiles_of(i32 batch) const { return ceil_div(max(0, Rows(args, batch).q_len), cfg::tile_q); }
    __device__ i32 recall(i32 lane) const { return __shfl_sync(0xffffffffu, kept, lane); }
    __device__ void keep(i32 lane, i32 x) {
        if (threadIdx.x % 32 == lane) kept = x;
    }

    // args.counter: {taken from the front, from the back, blocks that finished}, all 0 between launches. The first works of all blocks
    // count as taken in the order of the blocks.
    __device__ WorkTile next() {
        const i32 from_back = blockIdx.x & 1, lane = threadIdx.x % 32;
        u64 drawn = 0;
        if (own < 0 && lane == 0) drawn = atomicAdd(reinterpret_cast<u64*>(args.counter), from_back ? u64(1) << 32 : u64(1));
        const i32 first = own < 0 ? i32(gridDim.x) : own;
        own = -1;
        const i32 front = ptx::uniform(u32(drawn)) + (first + 1) / 2, back = ptx::uniform(u32(drawn >> 32)) + first / 2;
        const i32 works = recall(2) * args.heads, taken = from_back ? back : front, others = from_back ? front : back;
        if (front + back >= works) return {-1, 0, 0, 0};

        i32 before = recall(1);
#pragma unroll 1
        for (i32 base = recall(0);; base += 32) {
            const i32 at = base + lane, count = at < args.batches ? tiles_of(from_back ? args.batches - 1 - at : at) : 0;
            i32 end = before + count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, end, d);
                if (lane >= d) end += lower - before;
            }
            const u32 past = __ballot_sync(0xffffffffu, end * args.heads > taken);
            if (past) {
                const i32 owner = __ffs(past) - 1, last = __shfl_sync(0xffffffffu, end, owner), tiles = __shfl_sync(0xffffffffu, count, owner);
                const i32 by_others = max(0, others - (works - last * args.heads));  // of this sequence
                const i32 number = taken - (last - tiles) * args.heads + by_others, tile = number / args.heads;
                keep(0, base), keep(1, before);
                const i32 sequence = from_back ? args.batches - 1 - base - owner : base + owner;
                return {sequence, number - tile * args.heads, (tiles - 1 - tile) * cfg::tile_q, 0};
            }
            before = __shfl_sync(0xffffffffu, end, 31);
        }
    }
    __device__ void finish() const {
        u32* const finished = reinterpret_cast<u32*>(args.counter + 2);
        if (threadIdx.x % 32 != 0 || atomicInc(finished, gridDim.x - 1) != gridDim.x - 1) return;
        __threadfence();
        *reinterpret_cast<u64*>(args.counter) = 0;
    }
};
