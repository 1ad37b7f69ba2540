#pragma once
// A list for each row of q, which all heads share: args.keys, (rows, args.listed).
#include "variant/work_tile.cuh"

template <class Counts>
struct TokenLists {
    __device__ static const i32* numbers(const Args& args, const WorkTile& work) { return args.keys + work.batch * args.keys_row; }
    __device__ static i32 count(const Args& args, const WorkTile& work) { return Counts::of(args, work); }
};
