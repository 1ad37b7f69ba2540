#pragma once
// Every tile of dq has a sum: it was cleared before key tiles added to it (variant/dq/clear_sum.cuh).
#include "variant/interfaces_bwd.cuh"

struct ClearedSum {
    __device__ static bool is_there(const Args&, const Rows&, const Mask&, const WorkTile&, i32) { return true; }
};
