#pragma once
// A pool of pages: (pages, rows of a page, heads, columns), any outer strides. Pages past the last, and only these, read as zeros.
#include "ptx/tma.cuh"

struct TmaPages {
    TensorMap map;  // (columns of a panel, rows, panels, heads, pages)
    i32 count;

    // Starts the copy of a block of rows of one page.
    __device__ void load(void* to, ptx::Mbarrier& full, i32 page, i32 row, i32 head) const {
        ptx::tma_load(to, map, full, 0, row, 0, head, page);
    }
    // Says that the block will be read.
    __device__ void prefetch(i32 page, i32 row, i32 head) const { ptx::tma_prefetch(map, 0, row, 0, head, page); }
};
