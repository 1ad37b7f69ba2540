#pragma once
// IEEE single precision.
#include "ptx/base.cuh"

struct Element {
    using Number = float;
    float value;

    __device__ static float widen(Element x) { return x.value; }
    __device__ static Element narrow(float x) { return {x}; }
};
