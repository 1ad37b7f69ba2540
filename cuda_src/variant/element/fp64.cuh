#pragma once
// IEEE double precision.
#include "ptx/base.cuh"

struct Fp64 {
    using Number = double;
    double value;

    __device__ static double widen(Fp64 x) { return x.value; }
    __device__ static Fp64 narrow(double x) { return {x}; }
};
