#pragma once
// A number in global memory by which blocks wait for each other: https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model
#include "ptx/base.cuh"

namespace ptx {

__device__ inline i32 load_acquire(const i32* from) {
    i32 x;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline i32 load_relaxed(const i32* from) {
    i32 x;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}
__device__ inline void store_release(i32* to, i32 x) { asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }

}  // namespace ptx
