#pragma once
// A tile in shared memory for wgmma like those of tile/tile.cuh, in another order: eight rows of all panels of 64 columns, then the next
// eight rows. So rows of a page lie together, and one box of TMA brings them.
#include "ptx/base.cuh"

template <int rows, int columns>
struct alignas(1024) GroupedTile {
    static_assert(rows % 8 == 0 && columns % 64 == 0);
    static constexpr int panels = columns / 64;
    static constexpr int panel_bytes = 1024;  // from a panel of eight rows to the next
    static constexpr int group_bytes = panels * panel_bytes;
    static constexpr int bytes = rows / 8 * group_bytes;
    u16 data[rows / 8][panels][512];

    __device__ static constexpr u32 row_offset(u32 row) { return row / 8 * group_bytes + row % 8 * 128; }
};
