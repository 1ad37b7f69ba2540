#pragma once
// This is what the numbers that stand for keys in a cache are multiplied by: args.k_scale has it for each sequence and key head.
#include "ptx/base.cuh"

struct KScales {
    __device__ static float of(const Args& args, i32 batch, i32 head) {
        return args.k_scale[batch * args.k_scale_batch + head * args.k_scale_head];
    }
};
