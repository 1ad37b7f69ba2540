#pragma once
// A tile in shared memory whose rows come from pages, for ldmatrix: blocks of `block_rows` rows, which lie in one page, each of
// panels as wide as a swizzle span of TMA (128, 64 or 32 bytes) that divides a row, so that a box never reads the next head.
// A block is what one box of a 5-dimensional tensor map brings (tile/pages.cuh). Blocks have eight rows or more, so the swizzle
// goes on from one to the next.
#include "tile/swizzled.cuh"

template <int rows_, int row_bytes, int block_rows>
struct alignas(1024) PagedTile {
    static_assert(row_bytes % 32 == 0 && block_rows % 8 == 0 && rows_ % block_rows == 0);
    static constexpr int rows = rows_, chunks = row_bytes / 16;
    static constexpr int period = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4
                                                                        : 2;  // chunks of a panel
    static constexpr int panel_bytes = block_rows * period * 16, box_bytes = block_rows * row_bytes, bytes = rows * row_bytes;
    unsigned char data[bytes];

    __device__ void* box(u32 index) { return data + index * box_bytes; }

    // Where a chunk of a row lies, in bytes from the tile's beginning.
    __device__ static u32 offset(u32 row, u32 chunk) {
        return row / block_rows * box_bytes + chunk / period * panel_bytes + row % block_rows * (period * 16) +
               (chunk % period ^ row / (8 / period) % period) * 16;
    }
    __device__ static constexpr u32 block(int i, int panel) {
        return 16 * i / block_rows * box_bytes + 16 * i % block_rows * (period * 16) + panel * panel_bytes;
    }
    // The lanes of a warp clear rows [first, end).
    __device__ void clear(i32 first, i32 end = rows) {
        for (u32 i = first * chunks + threadIdx.x % 32; i < u32(end * chunks); i += 32)
            *reinterpret_cast<uint4*>(data + offset(i / chunks, i % chunks)) = make_uint4(0, 0, 0, 0);
    }
};
