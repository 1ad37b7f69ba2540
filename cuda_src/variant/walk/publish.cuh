#pragma once
// This is how the first warp of a Hopper kernel that keeps queries stationary hands a work to the others, with the classes of its first key
// tile; 0: it has none.
#include "tile/ring.cuh"
#include "variant/work_tile.cuh"

template <class Smem>
__device__ void publish(Smem& smem, Ring<2>& ring, const WorkTile& work, u32 first) {
    smem.work_empty[ring.stage].wait(ring.parity ^ 1);
    if (threadIdx.x == 0) {
        smem.work[ring.stage] = work, smem.board.first[ring.stage] = first;
        smem.work_full[ring.stage].arrive();
    }
    __syncwarp();
    ring.advance();
}
// Takes works until there are no more; `load` publishes a work itself.
template <class Producer, class Load>
__device__ void publish_works(Producer& producer, Load load) {
    Scheduler scheduler(producer.args);
    Ring<2> ring;
    WorkTile work;
    do {
        work = scheduler.next();
        if (work.is_last()) publish(producer.smem, ring, work, 0);
        else load(ring, work);
    } while (!work.is_last());
    scheduler.finish();
}
