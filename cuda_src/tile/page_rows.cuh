#pragma once
// A pool of pages, (pages, rows of a page, heads, columns), which TMA reads in panels of 64 columns, a run of rows at a time. A batch
// whose sequences use a part of their rows is one, too: its sequences are the pages.
#include "ptx/tma.cuh"
#include "tile/sequence.cuh"

struct TmaPageRows {
    TensorMap map;  // (columns, 2^30 rows, heads, a, b), as for packed sequences in tile/tma_tensor.cuh
    i32 count;      // pages
    i32 head_step, page_steps, row_steps;  // b counts such steps from the pool's beginning

    // Starts the copy of `rows` rows of a page, from `row` on: those of the box behind them arrive as zeros, whatever the page has
    // there.
    __device__ void load(void* to, ptx::Mbarrier& full, i32 page, i32 row, i32 rows, i32 column, i32 head) const {
        constexpr i32 bound = 1 << 30;
        ptx::tma_load(to, map, full, column, bound - rows, head * head_step, bound, page * page_steps + (row + rows) * row_steps);
    }
    // The same of rows that nobody else will read: L2 gives them away before others.
    __device__ void load_once(void* to, ptx::Mbarrier& full, i32 page, i32 row, i32 rows, i32 column, i32 head = 0) const {
        constexpr i32 bound = 1 << 30;
        ptx::tma_load_evict_first(to, map, full, column, bound - rows, head * head_step, bound, page * page_steps + (row + rows) * row_steps);
    }
    // The same for all rows of a sequence from `row` on.
    __device__ void load(void* to, ptx::Mbarrier& full, BatchSpan at, i32 column, i32 row, i32 head) const {
        load(to, full, at.index, row, at.length - row, column, head);
    }
};

// The same, all of whose rows are read once.
struct TmaPageRowsOnce : TmaPageRows {
    __device__ void load(void* to, ptx::Mbarrier& full, i32 page, i32 row, i32 rows, i32 column, i32 head) const {
        load_once(to, full, page, row, rows, column, head);
    }
};
