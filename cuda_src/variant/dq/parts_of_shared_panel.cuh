#pragma once
// Which columns of dq a warpgroup of attn_bwd.cu computes: its own panel of K, and its half of the last one, which both have. So dq of two
// panels and a part of a third is two equal parts. A half may begin within a panel: the swizzle is of addresses, as for the sixteen columns
// of a step of a contraction. In smem.dq columns lie in order.
#include "ptx/wgmma.cuh"

struct PartsOfSharedPanel {
    template <class K>
    struct Of {
        static constexpr int whole = DqMma::accumulators, half = DqHalfMma::accumulators, accumulators = whole + half;
        static_assert(cfg::consumers == 2 && cfg::dq_parts == 2 && cfg::dq_chains == 1 && 2 * accumulators == cfg::dq_columns);
        const K b, b_half;

        __device__ Of(K k_rows, u32 index)
            : b{k_rows.low + index * (K::panel_bytes / 16)}, b_half{k_rows.low + 2 * (K::panel_bytes / 16) + index * (half * 4 / 16)} {}

        template <class Ds>
        __device__ void multiply(float (&dq)[accumulators], Ds a) const {
            float (&of_panel)[whole] = reinterpret_cast<float (&)[whole]>(dq[0]), (&of_half)[half] = reinterpret_cast<float (&)[half]>(dq[whole]);
#pragma unroll
            for (int i = 0; i < cfg::tile_kv / 16; ++i) {
                DqMma::multiply(of_panel, a.columns(i), b.rows(i), i > 0);
                DqHalfMma::multiply(of_half, a.columns(i), b_half.rows(i), i > 0);
            }
        }
        // The place in `parts` of four accumulators of each thread, from i on.
        template <class Parts>
        __device__ static float4* place(Parts& parts, u32 index, int i) {
            const u32 columns = i < whole ? index * (whole / 4) + i / 4 : 2 * (whole / 4) + index * (half / 4) + (i - whole) / 4;  // eights
            return parts[0][0] + columns * 128;
        }
    };
};
