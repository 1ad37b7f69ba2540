#pragma once
// A tile in shared memory: panels of 64 columns, one 128-byte swizzle span wide, the last one filled up with zeros. A panel's
// rows follow each other, and eight of them make one pattern of the swizzle (1024 bytes), on which tiles are aligned.
#include "ptx/wgmma.cuh"

template <int rows, int columns>
struct alignas(1024) Tile {
    static constexpr int panels = (columns + 63) / 64;
    static constexpr int panel_bytes = rows * 128;
    static constexpr int group_bytes = 1024;  // from eight rows of a panel to the next eight
    static constexpr int bytes = panels * panel_bytes;
    u16 data[panels][rows * 64];

    __device__ static constexpr u32 row_offset(u32 row) { return row * 128; }
};

// A wgmma operand: the low word of its descriptor, in units of 16 bytes; the high word says 128-byte swizzle and the bytes from
// eight rows to the next eight. Descriptors are made from a precomputed low word: building each from an address costs some 130
// uniform instructions a step.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout-matrix-descriptor
template <class T>
struct SmemDescriptor {
    static constexpr int panel_bytes = T::panel_bytes;
    u32 low;

    // Contraction along the columns (Q and K in Q K^T).
    __device__ static SmemDescriptor of_columns(const T* tile) { return of_columns(ptx::smem_address(tile)); }
    __device__ static SmemDescriptor of_columns(u32 address) { return {address >> 4 | 1u << 16}; }
    // Contraction along the rows (V in P V): the next panel is a panel's bytes away.
    __device__ static SmemDescriptor of_rows(const T* tile) { return of_rows(ptx::smem_address(tile)); }
    __device__ static SmemDescriptor of_rows(u32 address) { return {address >> 4 | u32(T::panel_bytes / 16) << 16}; }

    __device__ SmemDescriptor stage(u32 index) const { return {low + index * (T::bytes / 16)}; }
    __device__ SmemDescriptor rows_from(u32 row) const {
        static_assert(T::group_bytes == 1024, "rows lie 128 bytes apart");
        return {low + row * 8};
    }
    // The k-th sixteen columns, or rows, of the contraction.
    __device__ u64 columns(int k) const { return descriptor(low + k / 4 * (T::panel_bytes / 16) + k % 4 * 2); }
    __device__ u64 rows(int k) const { return descriptor(low + k * (T::group_bytes / 8)); }

    __device__ static u64 descriptor(u32 low_word) {
        u64 d;
        asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low_word), "r"(0x40000000 | T::group_bytes / 16));
        return d;
    }
};

// Rows of sixteen columns, 32 bytes, whose halves change places in every second four rows: that is a swizzle of 32 bytes.
template <int rows>
struct alignas(256) NarrowTile {
    u16 data[rows * 16];

    __device__ static constexpr u32 offset(u32 row, u32 chunk) { return row * 32 + (chunk ^ row / 4 % 2) * 16; }
    // As an operand that is contracted along its columns.
    __device__ static u64 columns(u32 address) {
        const u32 low_word = address >> 4 | 1u << 16;
        u64 d;
        asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low_word), "r"(0xc0000000 | 256 / 16));
        return d;
    }
};
