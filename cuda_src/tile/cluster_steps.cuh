#pragma once
// What warps of a cluster's blocks say to each other, and descriptors there: an address has the block's rank from bit 24 on, which is masked.
#include "ptx/cluster.cuh"
#include "tile/tile.cuh"

// Arrives for a warp in every block of the cluster, when all its lanes have come.
__device__ inline void release(ptx::Mbarrier& empty, u32 arrivals = 1) {
    __syncwarp();
    if (threadIdx.x % 32 < cfg::cluster) ptx::arrive_at(empty, threadIdx.x % 32, arrivals);
}
// Arrives for a warp in the own block.
__device__ inline void say(ptx::Mbarrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
}

// The low word of a descriptor: with the bytes from a panel to the next where the contraction is along rows.
template <class T>
__device__ SmemDescriptor<T> by_columns(const T& tile) { return {ptx::own_address(&tile) >> 4 | 1u << 16}; }
template <class T>
__device__ SmemDescriptor<T> by_rows(const T& tile) { return {ptx::own_address(&tile) >> 4 | u32(T::panel_bytes / 16) << 16}; }
