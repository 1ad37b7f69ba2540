#pragma once
// This is what the numbers that stand for values in a cache are multiplied by: args.v_scale has it for each sequence and key head.
#include "ptx/base.cuh"

struct VScales {
    __device__ static float of(const Args& args, i32 batch, i32 head) {
        return args.v_scale[batch * args.v_scale_batch + head * args.v_scale_head];
    }
};
