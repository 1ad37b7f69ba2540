#pragma once
// The gradient of an array with an element for each query and key: each pair's is added by the thread that has the pair, for one
// sequence and head after the other (variant/scheduler/shared_tiles.cuh). So nothing is added at once, and the order is always one.
#include "ptx/base.cuh"

struct OfPairs {
    struct Shared {};

    __device__ OfPairs(const Args& args, Shared&) : args(args) {}

    template <class Element>
    __device__ void add(int, int, Number x, Element element) {
        __syncwarp();  // else the compiler loads for many pairs at once, and spills
        if (x != Number(0)) Sums::add(args, element(), x);
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {}
    __device__ void finish(const Gradient&, const Rows&, i32) {}

   private:
    const Args& args;
};
