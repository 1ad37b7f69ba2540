#pragma once
// One work for a block, and then no more.
#include "variant/work_tile.cuh"

template <class S>
struct Once : S {
    bool done = false;

    __device__ explicit Once(const Args& args) : S(args) {}

    __device__ WorkTile next() {
        if (done) return {-1, 0, 0, 0};
        done = true;
        return S::next();
    }
};
