#pragma once
// The number of the work, for a grid with a block for each: its own. The hardware starts blocks in order, each where one has ended.
// Nobody promises that, but all GPUs do it, and blocks of attn_bwd_mma that wait for those with smaller numbers need it. Where one does not,
// a number from a counter (variant/scheduler/dynamic_persistent.cuh) costs an atomic operation a block.
#include "ptx/base.cuh"

struct SingleTile {
    static constexpr i32 split = 0;
    __device__ static i32 draw(const Args&) { return blockIdx.x; }
    __device__ static void finish(const Args&) {}
};
