#pragma once
// Key tiles add their parts of dq to a float32 sum as they come, so that the last bits of dq vary from run to run. The pass before
// clears the sum (variant/dq/clear_sum.cuh), a pass after makes dq.
#include "variant/dq/slot.cuh"

struct DqUnordered {
    __device__ static bool finishes(Turn) { return false; }

    __device__ static void add(const Args& args, i32 place, Turn, const DqSlot& slot) {
        slot.full.wait(slot.parity);
        ptx::bulk_add(args.dq_sum + i64(place) * dq_floats, slot.data, dq_floats * 4);
        ptx::bulk_commit();
        ptx::bulk_wait_read();
        slot.empty.arrive();
    }
};
