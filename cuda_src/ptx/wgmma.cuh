#pragma once
// Warpgroup matrix multiply: https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
// The multiplications themselves are rendered for the shapes in use (wgmma() in render.py).
#include "ptx/base.cuh"

namespace ptx {

// Before a batch whose registers other instructions touched.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `pending` of the latest batches are unfinished.
template <int pending> __device__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"); }

}  // namespace ptx
