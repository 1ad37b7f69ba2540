#pragma once
// Matrix multiply of a warp, 16 x 8 x 8 of tf32 with float32 sums, d += a b; of a float32 the upper 19 bits are read:
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-mma
// d is laid out as in tile/fragment.cuh. A lane's a: rows lane / 4 and + 8 of column lane % 4, then the same rows four columns on; its
// b: rows lane % 4 and four on, of column lane / 4.
#include "ptx/base.cuh"

namespace ptx {

__device__ inline void mma_tf32(float* d, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace ptx
