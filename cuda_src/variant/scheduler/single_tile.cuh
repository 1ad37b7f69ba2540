#pragma once
// The number of the work, for a grid with a block for each: its own. The hardware starts blocks in order, each where one has ended.
#include "ptx/base.cuh"

struct SingleTile {
    static constexpr i32 split = 0;
    __device__ static i32 draw(const Args&) { return blockIdx.x; }
    __device__ static void finish(const Args&) {}
};
