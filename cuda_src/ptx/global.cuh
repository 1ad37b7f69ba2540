#pragma once
// Loads past L1, of what other blocks of the same launch have written:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#cache-operators
#include "ptx/base.cuh"

namespace ptx {

__device__ inline float4 load_from_l2(const float4* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
    return x;
}
__device__ inline float2 load_from_l2(const float2* from) {
    float2 x;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
    return x;
}

}  // namespace ptx
