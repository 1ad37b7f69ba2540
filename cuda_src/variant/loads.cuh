#pragma once
// Who brings tiles of K and V where a warpgroup loads: what their barriers count, and what products need before they read them.
#include "ptx/cp_async_mbarrier.cuh"
#include "ptx/tma.cuh"

// One warp or lane, by TMA.
struct LoadsByTma {
    using Barrier = ptx::Mbarrier;
    static constexpr u32 warps = 0;     // that copy
    static constexpr u32 arrivals = 1;  // on a tile's barrier

    template <class Args>
    __device__ static void prefetch(const Args& args) { ptx::prefetch(args.k.map), ptx::prefetch(args.v.map); }
    __device__ static void fence() {}
};
// The last warps of the warpgroup, 16 bytes at a time. Products see such copies only behind a fence.
template <u32 count>
struct LoadsByThreads {
    using Barrier = ptx::CopiesMbarrier;
    static constexpr u32 warps = count, arrivals = 32 * count, first_thread = 128 - arrivals;

    template <class Args>
    __device__ static void prefetch(const Args&) {}
    __device__ static void fence() { ptx::fence_proxy_async(); }
};
