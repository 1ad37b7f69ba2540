#pragma once
// A pool of pages that the blocks of a cluster read together: each brings a part of a tile to all of them.
#include "ptx/cluster.cuh"
#include "tile/page_rows.cuh"

struct TmaClusterPageRows : TmaPageRows {
    // As TmaPageRows::load_once, to the same place in every block of `ranks`, a bit for each.
    __device__ void load_all_once(void* to, ptx::Mbarrier& full, u16 ranks, i32 page, i32 row, i32 rows, i32 column) const {
        constexpr i32 bound = 1 << 30;
        ptx::tma_load_multicast_evict_first(to, map, full, ranks, column, bound - rows, 0, bound, page * page_steps + (row + rows) * row_steps);
    }
};
