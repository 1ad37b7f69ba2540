#pragma once
// This is what the numbers that stand for keys in a cache are multiplied by: args.k_scale.
#include "ptx/base.cuh"

struct KScale {
    __device__ static float of(const Args& args, i32, i32) { return args.k_scale; }
};
