#pragma once
// V of a work stays in shared memory, and parts of dq have a place of their own there.
#include "ptx/wgmma.cuh"

struct ValuesInSmem {
    static constexpr bool leaves_place = false;  // to dq, once a work has begun
    template <class Parts>
    using DqSpace = Parts[cfg::dq_stages];

    template <class Smem>
    __device__ static auto& dq(Smem& smem, u32 stage) { return smem.dq[stage]; }
    template <class Consumer>
    __device__ static void begin_work(const Consumer&) {}
    template <class Consumer, class B>
    __device__ static void multiply(Consumer& own, B d_o) {
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i) DpMma::multiply(own.dp, own.v_keys.columns(i), d_o.columns(i), i > 0);
    }
};
