#pragma once
// A tensor that TMA reads, or writes. A dimension that repeats one row (stride 0) has size 1 in the map and step 0 here.
#include "ptx/tma.cuh"
#include "tile/sequence.cuh"

struct TmaTensor {
    TensorMap map;
    i32 head_step, batch_step;

    // Starts the copy of a 64-column panel; rows past the sequence's end arrive as zeros. The map is (columns, rows, heads, batch).
    __device__ void load(void* to, ptx::Mbarrier& full, BatchEntry at, i32 column, i32 row, i32 head) const {
        ptx::tma_load(to, map, full, column, row, head * head_step, at.index * batch_step);
    }
    // TMA must fill up with zeros where a sequence ends, although the next one follows: a NaN there times a weight of 0
    // would reach kept rows. Its bounds are those of the tensor map, so the map (columns, 2^30 rows, heads, a, b) has two more
    // dimensions that move the end: row 2^30 - length + i is inside for i < length, and a = 2^30 with stride 2^34 - row bytes,
    // b = first + length with stride row bytes bring its address back to first + i, since 2^30 * 2^34 wraps around 64 bits.
    // (The idea is Triton's ragged tensor descriptor.)
    __device__ void load(void* to, ptx::Mbarrier& full, RowSpan at, i32 column, i32 row, i32 head) const {
        constexpr i32 bound = 1 << 30;
        ptx::tma_load(to, map, full, column, bound - at.length + row, head * head_step, bound, at.first + at.length);
    }
};

// The same, whose elements are read once, or written: L2 keeps others rather than them.
struct TmaTensorOnce : TmaTensor {
    __device__ void load(void* to, ptx::Mbarrier& full, BatchEntry at, i32 column, i32 row, i32 head) const {
        ptx::tma_load_evict_first(to, map, full, column, row, head * head_step, at.index * batch_step);
    }
    // Starts the copy of such a panel to the tensor; rows and columns past its ends are not written.
    __device__ void store(const void* from, BatchEntry at, i32 column, i32 row, i32 head) const {
        ptx::tma_store_evict_first(map, from, column, row, head * head_step, at.index * batch_step);
    }
};

// Starts the copies of all panels of a tile (tile/tile.cuh), from a row of a head on.
template <class Tensor, class T, class At>
__device__ void load_tile(const Tensor& tensor, T& tile, ptx::Mbarrier& full, At at, i32 row, i32 head) {
#pragma unroll
    for (int panel = 0; panel < T::panels; ++panel) tensor.load(tile.data[panel], full, at, panel * 64, row, head);
}
