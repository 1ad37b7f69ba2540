#pragma once
// Which columns of dq a warpgroup of attn_bwd.cu computes: whole panels of K from its own on, or all columns.
#include "ptx/wgmma.cuh"

struct PartsOfPanels {
    template <class K>
    struct Of {
        static constexpr int accumulators = DqMma::accumulators;
        const K b;

        __device__ Of(K k_rows, u32 index) : b{k_rows.low + (cfg::dq_parts > 1 ? index * (K::panel_bytes / 16) : 0)} {}

        template <class Ds>
        __device__ void multiply(float (&dq)[accumulators], Ds a) const {
#pragma unroll
            for (int i = 0; i < cfg::tile_kv / 16; ++i) DqMma::multiply(dq, a.columns(i), b.rows(i), i > 0);
        }
        // The place in `parts` of four accumulators of each thread, from i on.
        template <class Parts>
        __device__ static float4* place(Parts& parts, u32 index, int i) { return parts[cfg::dq_parts > 1 ? index : 0][i / 4]; }
    };
};
