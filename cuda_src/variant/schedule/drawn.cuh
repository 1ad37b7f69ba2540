#pragma once
// The numbers of the works, for a grid that fits the GPU: the block's own first, then from a counter in global memory, fetched one
// ahead so that nobody waits for it. The last block to finish resets the counter, so a launch needs no memset before it.
#include "ptx/base.cuh"

struct Drawn {
    i32 ahead = blockIdx.x;  // known to lane 0

    // args.counter: {drawn, finished}, both 0 between launches.
    __device__ i32 draw(const Args& args) {
        const i32 id = ptx::uniform(ahead);
        if (threadIdx.x % 32 == 0) ahead = gridDim.x + atomicAdd(args.counter, 1);
        return id;
    }
    __device__ static void finish(const Args& args) {
        if (threadIdx.x % 32 != 0 || atomicInc(reinterpret_cast<u32*>(args.counter + 1), gridDim.x - 1) != gridDim.x - 1) return;
        __threadfence();
        *args.counter = 0;
    }
};
