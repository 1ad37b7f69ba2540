#pragma once
// A hint that a line of memory will be read: it comes to L2, and nothing else happens. What is written meanwhile is seen.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// The same of many lines, by TMA: `bytes` is a multiple of 16, as the address is.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-prefetch
__device__ inline void bulk_prefetch_to_l2(const void* p, u32 bytes) { asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes)); }

}  // namespace ptx
