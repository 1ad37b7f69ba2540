#pragma once
// V of a work goes to registers, as left operands of dP, and parts of dq take its place in shared memory: the first one is made of dS of a step of
// this work, which all consumers leave when they have read V. The next V may come when the writers are done with the last part, too: they
// arrive at kv_empty.
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

struct ValuesInRegisters {
    static constexpr bool leaves_place = true;
    struct Nothing {};
    template <class Parts>
    using DqSpace = Nothing;
    u32 v[(cfg::head_dim_v + 15) / 16][4];

    template <class Smem>
    __device__ static auto& dq(Smem& smem, u32) {
        static_assert(cfg::dq_stages == 1 && sizeof(typename Smem::DqParts) <= sizeof(smem.v));
        return *reinterpret_cast<typename Smem::DqParts*>(&smem.v);
    }
    // Behind kv_full.
    template <class Consumer>
    __device__ void begin_work(const Consumer& own) {
        using Tile = decltype(own.smem.v);
        const u32 row = own.index * 64 + own.lane / 32 * 16 + own.lane % 16, to = ptx::smem_address(&own.smem.v) + row * 128;
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i)
            ptx::ldmatrix(v[i], to + i / 4 * Tile::panel_bytes + ((i % 4 * 2 + own.lane % 32 / 16) ^ row % 8) * 16);
    }
    template <class Consumer, class B>
    __device__ void multiply(Consumer& own, B d_o) const {
#pragma unroll
        for (int i = 0; i < (cfg::head_dim_v + 15) / 16; ++i) DpMma::multiply(own.dp, v[i], d_o.columns(i), i > 0);
    }
};
