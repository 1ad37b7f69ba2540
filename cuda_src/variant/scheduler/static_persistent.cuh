#pragma once
// The numbers of the works, for a grid that fits the GPU: a block's own, and those a grid further each. So of works with numbers next to
// each other, as many as there are blocks, each has a block of its own, where a block that draws from a counter may draw a second one
// while it still computes the first.
#include "ptx/base.cuh"

struct StaticPersistent {
    static constexpr i32 split = 0;
    i32 own = blockIdx.x;

    __device__ i32 draw(const Args&) {
        const i32 id = own;
        own += gridDim.x;
        return id;
    }
    __device__ static void finish(const Args&) {}
};
