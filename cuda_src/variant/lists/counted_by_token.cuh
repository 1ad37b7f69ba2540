#pragma once
// args.keys_counts say how many numbers of a row's list count, from the first one on.
#include "variant/work_tile.cuh"

struct CountedByToken {
    __device__ static i32 of(const Args& args, const WorkTile& work) { return args.keys_counts[work.batch * args.keys_counts_row]; }
};
