#pragma once
// Warps that have the same keys divide the columns, also those of the contractions, for heads so wide that tiles have few queries: S and dP are
// the sums of what each makes of its columns, which are exchanged. All add in one order, so each has the same P and dS in its registers.
#include "ptx/barrier.cuh"
#include "tile/warp_sums.cuh"

struct ByColumns {
    static constexpr bool meets = false;
    static constexpr int queries = cfg::tile_q, stride = cfg::sharing, groups = cfg::threads / 32 / cfg::sharing;
    struct Board { float4 sums[groups][cfg::sharing][cfg::chunk_q / 16 * cfg::m_tiles_per_warp * 2][32]; };
    static_assert(cfg::chunk_q == queries, "sums are left once a step");

    __device__ static constexpr u32 first_query(u32) { return 0; }
    __device__ static u32 first_block(u32 member) { return member; }
    // Whether a warp leaves this block of dS for dq, which all of them have.
    __device__ static bool leaves(int block, u32 member) { return block % cfg::sharing == member; }

    // `again`: sums of this step were left before, and others may not have read them yet.
    template <int n, int m>
    __device__ static void add_up(Board& board, float (&sums)[n][m][8], u32 member, bool again) {
        const u32 group = ptx::uniform(threadIdx.x / (32 * cfg::sharing)), lane = ptx::lane_id();
        if (again) ptx::bar_sync(1 + group, 32 * cfg::sharing);
#pragma unroll
        for (int i = 0; i < 2 * n * m; ++i) {
            const float* x = sums[i / 2 / m][i / 2 % m] + i % 2 * 4;
            board.sums[group][member][i][lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
        ptx::bar_sync(1 + group, 32 * cfg::sharing);
#pragma unroll
        for (int i = 0; i < 2 * n * m; ++i) {
            float* x = sums[i / 2 / m][i / 2 % m] + i % 2 * 4;
#pragma unroll
            for (int k = 0; k < cfg::sharing; ++k) {
                const float4 part = board.sums[group][k][i][lane];
                x[0] = k ? x[0] + part.x : part.x, x[1] = k ? x[1] + part.y : part.y;
                x[2] = k ? x[2] + part.z : part.z, x[3] = k ? x[3] + part.w : part.w;
            }
        }
    }
};
