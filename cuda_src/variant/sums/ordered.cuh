#pragma once
// Sums of an array's elements to each of which one thread adds, in one order.
#include "ptx/base.cuh"

struct OrderedSums {
    __device__ static void add(const Args& args, i64 element, Number x) { args.sums[element] += x; }
    __device__ static Number total(const Args& args, i64 element) { return args.sums[element]; }
};
