#pragma once
// Key tiles add their parts of dq to a float32 sum from registers, in one order, whatever blocks are faster: the same bits on every
// run. The first stores, so the sum need not be zero before. args.turns counts how many have added to a tile, from 0 on; the pass
// before this one clears it (variant/clear/turns.cuh).
#include "ptx/red.cuh"
#include "ptx/turn.cuh"

struct DqRedOrdered {
    // By one thread, before the block adds as number `turn`.
    __device__ static void wait(const Args& args, i32 place, i32 turn) {
        while (ptx::load_acquire(args.turns + place) != turn) {
        }
    }
    // By every thread.
    template <class Numbers>
    __device__ static void add(Numbers* to, const Numbers& x, bool first) {
        if (first) *to = x;
        else ptx::red_add(to->x, x.x);
    }
    // By one thread, when all have added.
    __device__ static void release(const Args& args, i32 place, i32 turn) { ptx::store_release(args.turns + place, turn + 1); }
};
