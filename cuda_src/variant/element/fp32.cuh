#pragma once
// IEEE single precision.
#include "ptx/base.cuh"

struct Fp32 {
    using Number = float;
    float value;

    __device__ static float widen(Fp32 x) { return x.value; }
    __device__ static Fp32 narrow(float x) { return {x}; }
};
