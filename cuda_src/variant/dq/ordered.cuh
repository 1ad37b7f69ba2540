#pragma once
// Key tiles add their parts of dq to a float32 sum in one order, whatever blocks are faster: the same bits on every run. The first
// stores, so the sum need not be zero before. A pass over the sums makes dq (attn_bwd_convert.cu).
// args.turns says of each part of a tile whose turn has come; the pass before this one sets it to the first (variant/dq/clear_turns.cuh).
#include "ptx/turn.cuh"
#include "variant/dq/slot.cuh"

struct DqOrdered {
    __device__ static bool finishes(Turn) { return false; }

    // By one thread. `place`: of the part in scratch.
    __device__ static void add(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        wait_for_turn(args, place, turn, slot);
        add_part(args, place, turn, slot);
    }
    // It is awaited before the part is there.
    __device__ static void wait_for_turn(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        i32 count;
        do count = ptx::load_acquire(args.turns + place);
        while (!turn.has_come(count));
        turn.see(slot.seen, count);
        ptx::fence_async_gmem();
    }
    __device__ static void add_part(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        float* sum = args.dq_sum + i64(place) * dq_floats;
        slot.full.wait(slot.parity);
        if (turn.is_first(slot.seen)) ptx::bulk_store(sum, slot.data, dq_floats * 4);
        else ptx::bulk_add(sum, slot.data, dq_floats * 4);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
        slot.empty.arrive();
        ptx::bulk_wait();  // the next one must find the sum, not only a buffer that was read
        ptx::fence_async_gmem();
        ptx::store_release(args.turns + place, turn.next());
    }
};
