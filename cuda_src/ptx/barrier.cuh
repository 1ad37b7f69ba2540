#pragma once
// Named barriers: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
// Barrier 0 is __syncthreads. `threads` counts those that arrive and those that wait.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void bar_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

}  // namespace ptx
