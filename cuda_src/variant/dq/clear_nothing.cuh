#pragma once
// The kernels that follow need nothing cleared.
#include "variant/work_tile.cuh"

struct ClearNothing {
    __device__ static void clear(const Args&, const Rows&, const Mask&, const WorkTile&, i32) {}
};
