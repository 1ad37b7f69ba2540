#pragma once
// dv of a warpgroup's keys is summed in registers of attn_bwd.cu, as dk is.
#include "ptx/wgmma.cuh"

struct SummedDv {
    float dv[DvMma::accumulators];

    __device__ void clear() {
#pragma unroll
        for (float& x : dv) x = 0.f;
    }
    // Adds what the step's p and dO give.
    template <class Consumer>
    __device__ void start(const Consumer& own) {
        const auto b = own.do_rows.stage(own.step.stage(cfg::do_stages));
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < cfg::tile_q / 16; ++i) DvMma::multiply(dv, own.p + 4 * i, b.rows(i), true);
        ptx::wgmma_commit();
    }
    template <class R, class W>
    __device__ void store(const Args& args, const StridedOutput& to, const R& rows, const W& work, i32 key) const {
        DkvRows::store(to.rows(rows.kv, work.kv_head), to.row_bytes, key, rows.kv_len, cfg::head_dim_v, dv, Weight::factor(args));
    }
};
