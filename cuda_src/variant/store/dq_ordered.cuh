#pragma once
// Key tiles add their parts of dq to a float32 sum in one order, whatever blocks are faster: the same bits on every run. The first
// stores, so the sum need not be zero before. A pass over the sums makes dq (attn_bwd_convert.cu).
// args.turns counts how many have added to a part of a tile, from 0 on; the pass before this one clears it (variant/clear/turns.cuh).
#include "ptx/turn.cuh"
#include "variant/store/dq_slot.cuh"

struct DqOrdered {
    __device__ static bool finishes(Turn) { return false; }

    // By one thread. `place`: of the part in scratch.
    __device__ static void add(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        wait_for_turn(args, place, turn);
        add_part(args, place, turn, slot);
    }
    // It is awaited before the part is there.
    __device__ static void wait_for_turn(const Args& args, i32 place, Turn turn) {
        while (ptx::load_acquire(args.turns + place) != turn.number) {}
        ptx::fence_async_gmem();
    }
    __device__ static void add_part(const Args& args, i32 place, Turn turn, const DqSlot& slot) {
        float* sum = args.dq_sum + i64(place) * dq_floats;
        slot.full.wait(slot.parity);
        if (turn.number == 0) ptx::bulk_store(sum, slot.data, dq_floats * 4);
        else ptx::bulk_add(sum, slot.data, dq_floats * 4);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
        slot.empty.arrive();
        ptx::bulk_wait();  // the next one must find the sum, not only a buffer that was read
        ptx::fence_async_gmem();
        ptx::store_release(args.turns + place, turn.number + 1);
    }
};
