#pragma once
// The same, and the last contributor makes dq itself: its writer brings the sum, its consumers add their part and store rows. No
// pass follows, and the sum is read once less; but the last contributor's step is longer.
#include "variant/dq/ordered.cuh"

struct DqOrderedFinal {
    __device__ static bool finishes(Turn turn) { return turn.is_last(); }

    __device__ static void add(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        DqOrdered::wait_for_turn(args, place, turn, slot);
        if (finishes(turn)) return bring_sum(args, place, turn, slot);
        slot.sum.arrive();  // its phases are counted by uses of the slot
        DqOrdered::add_part(args, place, turn, slot);
    }
    // Into the slot, which is free: this thread has read what was in it.
    __device__ static void bring_sum(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        const bool is_first = turn.is_first(slot.seen);
        slot.sum.arrive_expect(is_first ? 0 : dq_floats * 4);
        if (!is_first) ptx::bulk_load(slot.data, args.dq_sum + i64(place) * dq_floats, dq_floats * 4, slot.sum);
        slot.full.wait(slot.parity);
        slot.empty.arrive();
    }
};
