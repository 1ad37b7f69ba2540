#pragma once
// Another kernel makes dv (attn_bwd_dv.cu): where heads are wide, registers hold one of dk and dv.
#include "ptx/base.cuh"

struct DvElsewhere {
    __device__ static void clear() {}
    template <class Consumer>
    __device__ static void start(const Consumer&) {}
    template <class R, class W>
    __device__ static void store(const Args&, const StridedOutput&, const R&, const W&, i32) {}
};
