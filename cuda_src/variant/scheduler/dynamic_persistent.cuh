#pragma once
// The numbers of the works, for a grid that fits the GPU: the block's own first, then from a counter in global memory. Each is
// drawn when it is needed and no sooner: the producer needs it while the consumers still have a ring of tiles to compute, which
// hides the counter, and a block that drew ahead in the midst of a long work would keep its second one from blocks that are idle.
// The last block to finish resets the counter, so a launch needs no memset before it.
#include "ptx/base.cuh"

struct DynamicPersistent {
    static constexpr i32 split = 0;
    i32 own = blockIdx.x;  // -1 once it is taken

    // args.counter: {drawn, finished}, both 0 between launches.
    __device__ i32 draw(const Args& args) {
        i32 id = own;
        own = -1;
        if (id < 0 && threadIdx.x % 32 == 0) id = gridDim.x + atomicAdd(args.counter, 1);
        return ptx::uniform(id);
    }
    __device__ static void finish(const Args& args) {
        if (threadIdx.x % 32 != 0 || atomicInc(reinterpret_cast<u32*>(args.counter + 1), gridDim.x - 1) != gridDim.x - 1) return;
        __threadfence();
        *args.counter = 0;
    }
};
