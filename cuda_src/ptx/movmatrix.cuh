#pragma once
// An 8 x 8 matrix of 16-bit numbers across a warp: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-movmatrix
#include "ptx/base.cuh"

namespace ptx {

// Lane i has of row i / 4 the columns 2 * (i % 4) and the next, and receives the same of the transposed matrix.
__device__ inline u32 transpose(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

}  // namespace ptx
