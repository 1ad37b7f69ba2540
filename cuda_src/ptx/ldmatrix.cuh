#pragma once
// Four 8 x 8 matrices of 16-bit numbers from shared memory: https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
// Lane 8 m + i gives the address of row i of matrix m. It receives in word m row lane / 4, columns 2 * (lane % 4) and the next.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void ldmatrix(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}
// The same of the transposed matrices.
__device__ inline void ldmatrix_transposed(u32 (&d)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(address) : "memory");
}

}  // namespace ptx
