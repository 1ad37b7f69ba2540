#pragma once
// This is what the numbers that stand for values in a cache are multiplied by: args.v_scale.
#include "ptx/base.cuh"

struct VScale {
    __device__ static float of(const Args& args, i32, i32) { return args.v_scale; }
};
