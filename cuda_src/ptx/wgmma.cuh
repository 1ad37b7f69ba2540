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

// Accumulators whose values nobody needs any more, before a product overwrites them. To the compiler the product reads them, so
// that they would be live around the loop: ptxas then runs out of registers for its pipeline (C7512).
template <int n>
__device__ inline void wgmma_discard(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "=f"(x[i]));
}

}  // namespace ptx
