#pragma once
// Key tiles add their parts of dq to a float32 sum from registers as they come, so that the last bits of dq vary from run to run.
// The pass before clears the sum (variant/dq/clear_sum.cuh).
#include "ptx/red.cuh"

struct DqRedUnordered {
    __device__ static i32 ask(const Args&, i32) { return 0; }
    __device__ static bool wait(const Args&, i32, const Turn&, i32) { return false; }
    template <class Numbers>
    __device__ static void add(Numbers* to, const Numbers& x, bool) { ptx::red_add(to->x, x.x); }
    __device__ static void release(const Args&, i32, const Turn&) {}
};
