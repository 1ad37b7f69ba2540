#pragma once
// The warp's number in its block, read anew, as lane_id is, and known to the compiler to be the same in the whole warp.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline u32 warp_id() {
    u32 x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return uniform(x / 32);
}

}  // namespace ptx
