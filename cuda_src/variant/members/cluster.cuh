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
    __device__ static u32 address(const void* p) { return ptx::own_address(p); }
};
