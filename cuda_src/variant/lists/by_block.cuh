#pragma once
// A list for each head and block of queries of a sequence: args.keys, (sequences, heads, args.listed_blocks, args.listed).
#include "variant/work_tile.cuh"

template <class Counts>
struct BlockLists {
    __device__ static const i32* numbers(const Args& args, const WorkTile& work) {
        return args.keys + work.batch / args.listed_blocks * args.keys_sequence + work.head * args.keys_head +
               work.batch % args.listed_blocks * args.keys_row;
    }
    __device__ static i32 count(const Args& args, const WorkTile& work) { return Counts::of(args, work); }
};
