#pragma once
// Packed sequences from both ends: query tiles of the first sequence that is left and of the last one take turns, in each sequence the
// last tiles first, all heads of a tile together. So where sequences that decode stand before a prompt, or behind it, some blocks read
// their keys at the speed of memory, while others compute the prompt's tiles at that of the tensor cores.
//
// Of the tiles of a head, number 2 i is the i-th from the front and number 2 i + 1 the i-th from the back, sequence by sequence. They
// meet in one sequence, whose tiles go to both sides in the order of their numbers: which of them it is follows from how many tiles
// the other side has had of it.
#include "tile/range.cuh"
#include "variant/work_tile.cuh"

template <class Numbers>
struct BothEndsScheduler {
    const Args& args;
    Numbers numbers{};
    // A lane has what the warp remembers, since a producer has few registers: of the front in lanes 0 and 1, of the back in lanes 2
    // and 3, the first sequence of the 32 at hand, counted from there, and the tiles of all before it; in lane 4 those of all.
    i32 kept = 0;

    __device__ explicit BothEndsScheduler(const Args& args) : args(args) {
        i32 tiles = 0;  // of a head
#pragma unroll 4
        for (i32 batch = threadIdx.x % 32; batch < args.batches; batch += 32) tiles += tiles_of(batch);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) tiles += __shfl_xor_sync(0xffffffffu, tiles, d);
        keep(4, tiles);
    }
    __device__ i32 tiles_of(i32 batch) const { return ceil_div(max(0, Rows(args, batch).q_len), cfg::tile_q); }
    __device__ i32 recall(i32 lane) const { return __shfl_sync(0xffffffffu, kept, lane); }
    __device__ void keep(i32 lane, i32 x) {
        if (threadIdx.x % 32 == lane) kept = x;
    }

    __device__ WorkTile next() {
        const i32 id = numbers.draw(args), turn = id / args.heads, number = turn >> 1, from_back = turn & 1, lane = threadIdx.x % 32;
        i32 before = recall(2 * from_back + 1);
#pragma unroll 1
        for (i32 base = recall(2 * from_back); base < args.batches; base += 32) {
            const i32 at = base + lane, count = at < args.batches ? tiles_of(from_back ? args.batches - 1 - at : at) : 0;
            i32 end = before + count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, end, d);
                if (lane >= d) end += lower - before;
            }
            const u32 past = __ballot_sync(0xffffffffu, end > number);
            if (past) {
                const i32 owner = __ffs(past) - 1, own = __shfl_sync(0xffffffffu, count, owner), last = __shfl_sync(0xffffffffu, end, owner);
                const i32 others = number + from_back - (recall(4) - last);  // of this sequence that the other side had, if any
                const i32 tile = number - (last - own) + max(0, others);
                if (tile >= own) break;
                keep(2 * from_back, base), keep(2 * from_back + 1, before);
                const i32 sequence = from_back ? args.batches - 1 - base - owner : base + owner;
                return {sequence, id - turn * args.heads, (own - 1 - tile) * cfg::tile_q, numbers.split};
            }
            before = __shfl_sync(0xffffffffu, end, 31);
        }
        return {-1, 0, 0, 0};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
