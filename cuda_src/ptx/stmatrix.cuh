#pragma once
// Four 8 x 8 matrices of 16-bit numbers to shared memory: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
// Lane 8 m + i gives the address of row i of matrix m. A lane's word m holds row lane / 4, columns 2 * (lane % 4) and the next.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void stmatrix(u32 address, const u32* words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}
// Of the transposed matrices: the addresses are those of their rows, the words those of a matrix as it is.
__device__ inline void stmatrix_transposed(u32 address, const u32* words) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
}

}  // namespace ptx
