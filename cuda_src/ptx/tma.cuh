#pragma once
// The Tensor Memory Accelerator (TMA): https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor
// A box of a tensor map goes to shared memory; elements outside the tensor become zero, their bytes count on the barrier. Of swizzled panels
// it begins at a multiple of 16 bytes along the first dimension: elsewhere the copy is an illegal instruction (rawattn/array/tma.py).
#include "ptx/mbarrier.cuh"

struct alignas(64) TensorMap { u64 opaque[16]; };

namespace ptx {

__device__ inline void tma_load(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
__device__ inline void tma_load(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// L2 gives the lines away before others.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-createpolicy
__device__ inline u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline void tma_load_evict_first(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(evict_first()) : "memory");
}
__device__ inline void tma_load_evict_first(void* to, const TensorMap& map, Mbarrier& full, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(evict_first()) : "memory");
}
// A box of shared memory goes to the tensor, and leaves L2 likewise; what is outside of the tensor is not written. The copy is in the
// thread's bulk groups (ptx/bulk.cuh).
__device__ inline void tma_store_evict_first(const TensorMap& map, const void* from, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;"
                 : : "l"(&map), "r"(smem_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(evict_first()) : "memory");
}
// The box comes to L2, and nothing else happens. What is written meanwhile is seen.
__device__ inline void tma_prefetch(const TensorMap& map, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];"
                 : : "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// Orders the thread's own writes to shared memory before copies that TMA makes there later.
__device__ inline void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void prefetch(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

}  // namespace ptx
