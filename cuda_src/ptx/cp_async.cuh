#pragma once
// Asynchronous copies by threads: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async
// A thread's copies form groups, which finish in order; only that thread sees them finished.
#include "ptx/base.cuh"

namespace ptx {

// Sixteen bytes past L1: the first `bytes` of them from `from`, the others zero.
__device__ inline void cp_async(u32 to, const void* from, u32 bytes = 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same with offsets in the instruction. Of many copies with offsets from one address a compiler may make as many addresses.
template <int to_offset, int from_offset>
__device__ void cp_async(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0+%3], [%1+%4], 16, %2;" ::"r"(to), "l"(from), "r"(bytes), "n"(to_offset), "n"(from_offset) : "memory");
}
// Four bytes, by way of L1.
__device__ inline void cp_async_word(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` of the thread's latest groups are unfinished.
template <int pending> __device__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

}  // namespace ptx
