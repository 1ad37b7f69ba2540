#pragma once
// The sum of a tile of dq, to which blocks add in any order (variant/dq/unordered.cuh).
#include "variant/work_tile.cuh"

struct ClearDqSum {
    __device__ static void clear(const Args& args, const Rows&, const Mask&, const WorkTile&, i32 place) {
        constexpr i32 floats = cfg::tile_q * cfg::dq_columns * cfg::dq_parts;
        float4* to = reinterpret_cast<float4*>(args.dq_sum + i64(place) * floats);
        for (i32 i = threadIdx.x; i < floats / 4; i += cfg::threads) to[i] = float4{};
    }
};
