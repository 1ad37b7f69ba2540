#pragma once
// Atomic operations that order memory: https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#include "ptx/base.cuh"

namespace ptx {

// Gives what was there. What the block wrote before a barrier in front of it is there for whoever reads the sum by such an addition,
// and for the other threads of that block after a barrier.
__device__ inline u32 add_acq_rel(u32* to, u32 x) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(to), "r"(x) : "memory");
    return old;
}

// A word that others may add to at this moment.
__device__ inline u32 load_relaxed(const u32* from) {
    u32 x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

}  // namespace ptx
