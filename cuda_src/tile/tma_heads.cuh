#pragma once
// A tensor like q, which TMA reads for tiles whose rows are the queries of some heads side by side (variant/rows/cache.cuh). It has
// the loads of TmaTensor (tile/tma_tensor.cuh), but that rows and heads are those of such tiles.
#include "ptx/tma.cuh"
#include "tile/sequence.cuh"

struct TmaHeads {
    TensorMap map;  // (columns, heads, rows, batch, 1), or (columns, heads, 2^30 rows, a, b) where sequences are end to end
    i32 heads, batch_step;

    __device__ void load(void* to, ptx::Mbarrier& full, BatchEntry at, i32 column, i32 row, i32 head) const {
        ptx::tma_load(to, map, full, column, head * heads, row / heads, at.index * batch_step, 0);
    }
    __device__ void load(void* to, ptx::Mbarrier& full, RowSpan at, i32 column, i32 row, i32 head) const {
        constexpr i32 bound = 1 << 30;
        ptx::tma_load(to, map, full, column, head * heads, bound - at.length + row / heads, bound, at.first + at.length);
    }
};
