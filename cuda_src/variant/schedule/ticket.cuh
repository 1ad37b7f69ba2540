#pragma once
// Numbers that the blocks of a grid draw, each once: the block's own first, then from a counter in global memory, fetched one
// ahead so that nobody waits for it. The last block to finish resets the counter, so a launch needs no memset before it.
#include "ptx/base.cuh"

struct Ticket {
    i32 ahead = blockIdx.x;  // known to lane 0

    // counter: {drawn, finished}, both 0 between launches.
    __device__ i32 draw(i32* counter) {
        const i32 id = ptx::uniform(ahead);
        if (threadIdx.x % 32 == 0) ahead = gridDim.x + atomicAdd(counter, 1);
        return id;
    }
    __device__ static void finish(i32* counter) {
        if (threadIdx.x % 32 != 0 || atomicInc(reinterpret_cast<u32*>(counter + 1), gridDim.x - 1) != gridDim.x - 1) return;
        __threadfence();
        *counter = 0;
    }
};
