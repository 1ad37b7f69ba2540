#pragma once
// Blocks that have rows of the same works are a cluster, and bring each a part of a tile to all of them (attn_mla.cu). So they go along the same
// tiles, those that any of their rows needs, and a stage is loaded anew when all have given it back.
#include "ptx/cluster.cuh"

// Here the launch learns of the cluster.
extern "C" __global__ __cluster_dims__(cfg::members) void attn_mla(const __grid_constant__ Args args);

struct ClusterMembers {
    static constexpr bool together = true;
    static constexpr u32 readers = cfg::members;

    // Barriers are made; no block ends while others reach it.
    __device__ static void begin() { ptx::cluster_sync(); }
    __device__ static void end() { __syncwarp(), ptx::cluster_sync(); }
    __device__ static void give_back(ptx::Mbarrier& empty) {
        if (ptx::lane_id() < readers) ptx::arrive_at(empty, ptx::lane_id(), 1);
    }
    // The first one finds works, and sends them to the others.
    __device__ static bool finds() { return blockIdx.x % cfg::members == 0; }
    template <class Work>
    __device__ static void send(Work& to, u32 rank, ptx::Mbarrier& work_full, const Work& work) {
        struct Words { u32 word[sizeof(Work) / 4]; };
        const u32 there = ptx::at_rank(ptx::smem_address(&to), rank), full = ptx::at_rank(ptx::smem_address(&work_full), rank);
        const Words words = __builtin_bit_cast(Words, work);
#pragma unroll
        for (u32 i = 0; i < sizeof(Work) / 4; ++i) ptx::store_async(there + i * 4, full, words.word[i]);
    }
    __device__ static void release(ptx::Mbarrier& work_empty) {
        if (ptx::lane_id() == 0) ptx::arrive_at(work_empty, 0, 1);
    }
    __device__ static u32 address(const void* p) { return ptx::own_address(p); }
};
