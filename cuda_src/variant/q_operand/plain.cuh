#pragma once
// Q is an operand of products as it lies in memory.
#include "variant/work_tile.cuh"

struct PlainQ {
    template <class Tile, class Meet>
    __device__ void prepare(const Args&, const WorkTile&, Tile&, i32, float*, Meet) {}
    template <int n>
    __device__ void scale(float (&)[n]) const {}
};
