#pragma once
// All numbers of a list count.
#include "variant/work_tile.cuh"

struct WholeLists {
    __device__ static i32 of(const Args& args, const WorkTile&) { return args.listed; }
};
