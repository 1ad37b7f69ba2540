#pragma once
// Blocks that have rows of the same works bring keys each for itself (attn_mla.cu).
#include "ptx/mbarrier.cuh"

struct ApartMembers {
    static constexpr bool together = false;
    static constexpr u32 readers = 1;  // blocks that read what a block brings

    __device__ static void begin() { __syncthreads(); }
    __device__ static void end() {}
    // By a warp.
    __device__ static void give_back(ptx::Mbarrier& empty) {
        if (ptx::lane_id() == 0) empty.arrive();
    }
    // Each finds its works.
    __device__ static constexpr bool finds() { return true; }
    template <class Work> __device__ static void send(Work&, u32, ptx::Mbarrier&, const Work&) {}
    __device__ static void release(ptx::Mbarrier& work_empty) { give_back(work_empty); }
    // Where something lies, as descriptors of wgmma say it.
    __device__ static u32 address(const void* p) { return ptx::smem_address(p); }
};
