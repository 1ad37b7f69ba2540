#pragma once
// This is what the numbers that stand for keys, or for values, in a cache are multiplied by: a number of Args, or an array of it that has one
// for each sequence and key head.
#include "ptx/base.cuh"

template <auto number>
struct CacheScale {
    __device__ static float of(const Args& args, i32, i32) { return args.*number; }
};
template <auto numbers, auto batch_stride, auto head_stride>
struct CacheScales {
    __device__ static float of(const Args& args, i32 batch, i32 head) {
        return (args.*numbers)[batch * args.*batch_stride + head * args.*head_stride];
    }
};
