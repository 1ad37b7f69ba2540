#pragma once
// Key tiles add their parts of dq to a float32 sum from registers, in one order, whatever blocks are faster: the same bits on every
// run. The first stores, so the sum need not be zero before. args.turns says of each tile whose turn has come; the pass before this one
// sets it to the first (variant/clear/turns.cuh).
#include "ptx/red.cuh"
#include "ptx/turn.cuh"

struct DqRedOrdered {
    // By one thread, before the block adds.
    __device__ static void wait(const Args& args, i32 place, const Turn& turn, Turn::Seen& seen) {
        i32 count;
        do count = ptx::load_acquire(args.turns + place);
        while (!turn.has_come(count));
        turn.see(seen, count);
    }
    // By every thread.
    template <class Numbers>
    __device__ static void add(Numbers* to, const Numbers& x, bool first) {
        if (first) *to = x;
        else ptx::red_add(to->x, x.x);
    }
    // By one thread, when all have added.
    __device__ static void release(const Args& args, i32 place, const Turn& turn) { ptx::store_release(args.turns + place, turn.next()); }
};
