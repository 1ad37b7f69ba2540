#pragma once
// TMA on bytes on end: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk
// and, added: https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk
// Addresses and sizes are multiples of 16 bytes. What leaves shared memory forms groups of the thread, as cp.async does.
#include "ptx/mbarrier.cuh"

namespace ptx {

__device__ inline void bulk_load(void* to, const void* from, u32 bytes, Mbarrier& full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(to)), "l"(from), "r"(bytes), "r"(smem_address(&full)) : "memory");
}
__device__ inline void bulk_store(float* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)), "r"(bytes) : "memory");
}
// Adds float32, each number at once: adds of several blocks to one place may run together, and their order sets the rounding.
__device__ inline void bulk_add(float* to, const void* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(smem_address(from)), "r"(bytes) : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all groups have read shared memory; until all have written, too.
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders this thread's plain accesses to shared memory, or to global memory, and those of TMA and of wgmma:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-membar
// Without a state space it is one for all of the GPU's memory, some hundred clocks.
__device__ inline void fence_async_smem() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_async_gmem() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace ptx
