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
    struct Way { i32 base = 0, before = 0; };  // first sequence of the 32 at hand, counted from its end; query tiles of all before it
    const Args& args;
    Numbers numbers{};
    Way front, back;
    i32 tiles = 0;  // of a head

    __device__ explicit BothEndsScheduler(const Args& args) : args(args) {
        for (i32 batch = threadIdx.x % 32; batch < args.batches; batch += 32) tiles += tiles_of(batch);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) tiles += __shfl_xor_sync(0xffffffffu, tiles, d);
    }
    __device__ i32 tiles_of(i32 batch) const { return ceil_div(max(0, Rows(args, batch).q_len), cfg::tile_q); }

    __device__ WorkTile next() {
        const i32 id = numbers.draw(args), number = id / args.heads / 2, from_back = id / args.heads % 2, lane = threadIdx.x % 32;
        Way way = from_back ? back : front;
        for (; way.base < args.batches; way.base += 32) {
            const i32 at = way.base + lane, count = at < args.batches ? tiles_of(from_back ? args.batches - 1 - at : at) : 0;
            i32 end = way.before + count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const i32 lower = __shfl_up_sync(0xffffffffu, end, d);
                if (lane >= d) end += lower - way.before;
            }
            const u32 past = __ballot_sync(0xffffffffu, end > number);
            if (past) {
                const i32 owner = __ffs(past) - 1, own = __shfl_sync(0xffffffffu, count, owner), last = __shfl_sync(0xffffffffu, end, owner);
                const i32 others = number + from_back - (tiles - last);  // of this sequence that the other side had, if any
                const i32 tile = number - (last - own) + max(0, others);
                if (tile >= own) break;
                (from_back ? back : front) = way;
                const i32 sequence = way.base + owner;
                return {from_back ? args.batches - 1 - sequence : sequence, id % args.heads, (own - 1 - tile) * cfg::tile_q, numbers.split};
            }
            way.before = __shfl_sync(0xffffffffu, end, 31);
        }
        return {-1, 0, 0, 0};
    }
    __device__ void finish() const { Numbers::finish(args); }
};
