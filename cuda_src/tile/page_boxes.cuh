#pragma once
// A pool of pages, (pages, rows of a page, heads, columns), which TMA reads in boxes of all columns of some rows of a page, eight rows
// after the other: as tile/grouped_tile.cuh has them.
#include "ptx/tma.cuh"

struct TmaPageBoxes {
    TensorMap map;  // (64 columns, 8 rows, panels, eights of rows in a box, steps from the pool's beginning)
    i32 count;      // pages
    i32 page_steps, head_steps;  // from one to the next

    // Where a page of a head begins; no page arrives as zeros.
    __device__ i32 place(i32 page, i32 head) const { return page < 0 ? -1 : page * page_steps + head * head_steps; }
    __device__ void load(void* to, ptx::Mbarrier& full, i32 place) const { ptx::tma_load(to, map, full, 0, 0, 0, 0, place); }
    __device__ void load_once(void* to, ptx::Mbarrier& full, i32 place) const { ptx::tma_load_evict_first(to, map, full, 0, 0, 0, 0, place); }
};
