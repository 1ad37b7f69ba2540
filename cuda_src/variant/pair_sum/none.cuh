#pragma once
// The bias of pairs has no gradient.
#include "tile/triangle_work.cuh"

struct NoPairSum {
    __device__ void take(int, int, float) {}
    __device__ void add(const Args&, const TriangleWork&, i32, i32, bool) const {}
};
