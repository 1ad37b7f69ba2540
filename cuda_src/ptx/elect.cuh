#pragma once
// One lane of a converged warp, for TMA: https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-elect-sync
// TMA takes its operands from uniform registers. Where lanes have their own, the compiler makes a loop over them, whose turns take some 65
// clocks each. It makes none where one lane is elected and all operands come `from_lane`.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline bool elect() {
    u32 is_elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is_elected));
    return is_elected;
}
// A lane's value. Where the lane is a constant, the compiler knows it to be the same in the whole warp.
__device__ inline i32 from_lane(i32 x, i32 lane) { return __shfl_sync(0xffffffffu, x, lane); }

}  // namespace ptx
