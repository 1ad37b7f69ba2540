#pragma once
// An 8 x 8 matrix of 16-bit numbers in a warp's registers, transposed: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-movmatrix
// A lane's word holds row lane / 4, columns 2 * (lane % 4) and the next.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline u32 movmatrix_transposed(u32 word) {
    u32 x;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(word));
    return x;
}

}  // namespace ptx
