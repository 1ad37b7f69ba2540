#pragma once
// A word of shared memory: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
#include "ptx/base.cuh"

namespace ptx {

__device__ inline u32 load_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

}  // namespace ptx
