#pragma once
// Clusters of blocks, which reach each other's shared memory: https://docs.nvidia.com/cuda/parallel-thread-execution/#cluster
// In a cluster an address of shared memory has the block's rank from bit 24 on.
#include "ptx/tma.cuh"

namespace ptx {

__device__ inline u32 cluster_rank() {
    u32 x;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
    return x;
}
// Where something lies in its own block's shared memory, as descriptors of wgmma say it.
__device__ inline u32 own_address(const void* p) { return smem_address(p) & 0xffffff; }
// All threads of all blocks meet. What was written to shared memory before, its barriers too, is seen behind it.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives `count` times at the barrier that lies at this place in the block of another rank, or the own one: what this thread read before may be
// overwritten. What it wrote is not passed on: a release for the cluster would be a MEMBAR.ALL.GPU, some hundred clocks of each arrival, and an
// acquire behind it throws away what L1 has. Products and copies have ended for all who wait for them, whatever the scope.
__device__ inline void arrive_at(Mbarrier& barrier, u32 rank, u32 count) {
    asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.release.cta.shared::cluster.b64 _, [there], %2; }" ::"r"(smem_address(&barrier)), "r"(rank), "r"(count) : "memory");
}
// What lies at an address of shared memory in the block of another rank.
__device__ inline u32 at_rank(u32 address, u32 rank) {
    u32 x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
    return x;
}
// Writes to another block, where the bytes count on a barrier of that block: both are addresses there.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async
__device__ inline void store_async(u32 to, u32 full, u32 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(x), "r"(full) : "memory");
}
__device__ inline void store_async(u32 to, u32 full, const uint4& x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(full) : "memory");
}
// A box goes to this place in each block of `ranks`, a bit for each, and its bytes count on the barrier at this place there.
__device__ inline void tma_load_multicast(void* to, const TensorMap& map, Mbarrier& full, u16 ranks, i32 c0, i32 c1, i32 c2, i32 c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(ranks) : "memory");
}
__device__ inline void tma_load_multicast(void* to, const TensorMap& map, Mbarrier& full, u16 ranks, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ranks) : "memory");
}
__device__ inline void tma_load_multicast_evict_first(void* to, const TensorMap& map, Mbarrier& full, u16 ranks, i32 c0, i32 c1, i32 c2, i32 c3, i32 c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8, %9;"
                 : : "r"(smem_address(to)), "l"(&map), "r"(smem_address(&full)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(ranks), "l"(evict_first()) : "memory");
}

}  // namespace ptx
