#pragma once
// Key tiles add their parts of dq to a float32 sum from registers, in one order, whatever blocks are faster: the same bits on every
// run. The first stores, so the sum need not be zero before. args.turns says of each tile whose turn has come; the pass before this one
// sets it to the first (variant/dq/clear_turns.cuh).
//
// A thread asks for its turn by a relaxed load, which orders nothing by PTX's memory model. Adds come in order all the same. Those of the
// block before are done in L2 when it passes the turn on, by its release. Those of this thread are issued after a branch on what the load
// has brought, and L2 does stores and adds to a place in the order in which they arrive. Nothing that others wrote is read. With a fence
// before the adds it is so by the letter, and the kernel takes 8 to 12 % longer (perf/notes/attn_bwd_mma.md). No slice of L2 matters: the
// release waits until the adds before it are done wherever they are done, and no GPU issues a store or an add before the branch that it
// follows is decided. On one that does, perf/ablations/attn_bwd_mma/fenced.patch is the form.
#include "ptx/red.cuh"
#include "ptx/turn.cuh"

struct DqRedOrdered {
    // By every thread, long before it adds.
    __device__ static i32 ask(const Args& args, i32 place) { return ptx::load_relaxed(args.turns + place); }
    // By every thread, before it adds.
    __device__ static bool wait(const Args& args, i32 place, const Turn& turn, i32 asked) {
        while (!turn.has_come(asked)) asked = ptx::load_acquire(args.turns + place);
        Turn::Seen seen;
        turn.see(seen, asked);
        return turn.is_first(seen);
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
