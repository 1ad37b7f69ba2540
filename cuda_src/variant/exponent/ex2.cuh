#pragma once
// Every exponential by the instruction for it, of which a multiprocessor has 16 a clock.
#include "ptx/base.cuh"

struct Ex2 {
    // 2^x of a thread's element i.
    __device__ static float of(float x, int) { return ptx::exp2(x); }
};
