#pragma once
// A hint that a line of memory will be read: it comes to L2, and nothing else happens. What is written meanwhile is seen.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

}  // namespace ptx
