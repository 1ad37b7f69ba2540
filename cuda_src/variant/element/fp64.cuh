#pragma once
// IEEE double precision.
#include "ptx/base.cuh"

struct Element {
    using Number = double;
    double value;

    __device__ static double widen(Element x) { return x.value; }
    __device__ static Element narrow(double x) { return {x}; }
};
