#pragma once
// The first warp of a Hopper kernel that keeps queries stationary: it takes works, hands them to the other warps, and loads their
// tiles. Smem has two places for works with their barriers, and one lane calls `load` for each of them.
#include "tile/ring.cuh"

template <class Smem, class Load>
__device__ void produce_works(const Args& args, Smem& smem, Load load) {
    Scheduler scheduler(args);
    Ring<2> ring;
    WorkTile work;
    do {
        work = scheduler.next();
        smem.work_empty[ring.stage].wait(ring.parity ^ 1);
        if (threadIdx.x == 0) {
            smem.work[ring.stage] = work;
            smem.work_full[ring.stage].arrive();
            if (!work.is_last()) load(work);
        }
        __syncwarp();
        ring.advance();
    } while (!work.is_last());
    scheduler.finish();
}
