#pragma once
// args.keys_counts say how many numbers of the list of a head and a block of queries count, from the first one on.
#include "variant/work_tile.cuh"

struct CountedByBlock {
    __device__ static i32 of(const Args& args, const WorkTile& work) {
        return args.keys_counts[work.batch / args.listed_blocks * args.keys_counts_sequence + work.head * args.keys_counts_head +
                                work.batch % args.listed_blocks * args.keys_counts_row];
    }
};
