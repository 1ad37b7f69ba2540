#pragma once
// Who brings tiles of K and V where the first warpgroup loads: what their barriers count, and what products need before they read them.
#include "ptx/cp_async_mbarrier.cuh"
#include "ptx/tma.cuh"

// One warp or lane, by TMA.
struct LoadsByTma {
    using Barrier = ptx::Mbarrier;
    static constexpr u32 arrivals = 1;       // on a tile's barrier
    static constexpr u32 work_readers = 0;   // warps of the producer that are told of a work

    template <class Args>
    __device__ static void prefetch(const Args& args) { ptx::prefetch(args.k.map), ptx::prefetch(args.v.map); }
    __device__ static void fence() {}
};
// Every thread of the warpgroup, 16 bytes at a time. Products see such copies only behind a fence.
struct LoadsByThreads {
    using Barrier = ptx::CopiesMbarrier;
    static constexpr u32 arrivals = 128, work_readers = 3;

    template <class Args>
    __device__ static void prefetch(const Args&) {}
    __device__ static void fence() { ptx::fence_proxy_async(); }
};
