#pragma once
// What a state of splits gives becomes rows of o, and their lse: by threads that have args, smem.work.run, and rows 16 m on of it.
#include "tile/log_sum.cuh"
#include "tile/softmax_state.cuh"

template <class Warps>
struct StateStore : Warps {
    using Warps::args, Warps::m, Warps::smem, Warps::Warps;

    // Of the lane that had the rows; `column`: of the state's first block.
    template <int blocks>
    __device__ void store(const SoftmaxState<blocks>& state, i32 lane, i32 column, float scale_log2) const {
        const WorkTile& run = smem.work.run;
        const Rows rows(args, run.batch);
        const Store out(args, rows, run);
        const Softmax softmax(args, rows, run, scale_log2);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const i32 row = run.q_begin + 16 * m + lane / 4 * 2 + r;
            if (row >= rows.q_len) continue;
            LogSum<float> sum{__fmul_rn(state.max[r], scale_log2 * float(ln_2)), state.sum[r]};  // no part of another product's sum
            softmax.finish(row, sum);
            const float factor = sum.inverse();
            OElement* const to = out.o(row) + column + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < blocks; ++i) {
                const float4 x = state.o[i];
                if (column + i * 8 < cfg::head_dim_v)
                    *reinterpret_cast<u32*>(to + i * 8) = OElement::pack((r ? x.z : x.x) * factor, (r ? x.w : x.y) * factor);
            }
            if (column == 0 && lane % 4 == 0) out.lse(row, __fmaf_rn(__log2f(sum.total), float(ln_2), sum.reference));
        }
    }
};
