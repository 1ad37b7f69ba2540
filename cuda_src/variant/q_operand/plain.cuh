#pragma once
// Q is an operand of products as it lies in memory.
#include "ptx/base.cuh"

struct PlainQ {
    template <class Tile, class Meet>
    __device__ void prepare(Tile&, i32, u32, float*, Meet) {}
    template <int n>
    __device__ void scale(float (&)[n]) const {}
};
