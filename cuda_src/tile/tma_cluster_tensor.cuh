#pragma once
// A tensor that the blocks of a cluster read together: each brings a part of a tile to all of them.
#include "ptx/cluster.cuh"
#include "tile/tma_tensor.cuh"

struct TmaClusterTensor : TmaTensor {
    // As TmaTensor::load, to the same place in every block of `ranks`, a bit for each.
    __device__ void load_all(void* to, ptx::Mbarrier& full, u16 ranks, BatchEntry at, i32 column, i32 row, i32 head) const {
        ptx::tma_load_multicast(to, map, full, ranks, column, row, head * head_step, at.index * batch_step);
    }
    __device__ void load_all(void* to, ptx::Mbarrier& full, u16 ranks, RowSpan at, i32 column, i32 row, i32 head) const {
        constexpr i32 bound = 1 << 30;
        ptx::tma_load_multicast(to, map, full, ranks, column, bound - at.length + row, head * head_step, bound, at.first + at.length);
    }
};
