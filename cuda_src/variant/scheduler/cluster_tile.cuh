#pragma once
// The number of the work, for a grid with a cluster of blocks for each: the cluster's own.
#include "ptx/base.cuh"

struct ClusterTile {
    static constexpr i32 split = 0;
    __device__ static i32 draw(const Args&) { return blockIdx.x / cfg::cluster; }
    __device__ static void finish(const Args&) {}
};
