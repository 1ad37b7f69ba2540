#pragma once
// What an online softmax has found over some keys, and how two such findings become one. Four warps share the columns: each has a
// quarter of the fragment's blocks (tile/fragment.cuh), for all rows, so none of them needs another's numbers.
#include "ptx/cp_async.cuh"
#include "tile/fragment.cuh"
#include "tile/range.cuh"

constexpr int column_blocks = cfg::head_dim_v / 8;                           // of eight columns, in a whole fragment
constexpr int state_quads = ceil_div(column_blocks, 4) * cfg::m_tiles_per_warp;  // of four registers: in a quarter
constexpr int merge_quads = state_quads / cfg::merge_passes;
static_assert(state_quads % cfg::merge_passes == 0 && merge_quads % cfg::m_tiles_per_warp == 0);

template <int quads>
struct SoftmaxState {
    float4 o[quads];
    float max[rows_each], sum[rows_each];

    // Maxima and sums as they lie in memory: those of two rows together.
    __device__ void set(int m, float4 x) { max[2 * m] = x.x, sum[2 * m] = x.y, max[2 * m + 1] = x.z, sum[2 * m + 1] = x.w; }
    __device__ float4 max_sum(int m) const { return make_float4(max[2 * m], sum[2 * m], max[2 * m + 1], sum[2 * m + 1]); }

    // Folds what was found over keys that follow. An empty state is a neutral one: it has the lowest maximum, which is finite.
    __device__ void fold(const SoftmaxState& next, float scale_log2) {
        float here[rows_each], there[rows_each];
#pragma unroll
        for (int r = 0; r < rows_each; ++r) {
            const float m = fmaxf(max[r], next.max[r]);
            here[r] = ptx::exp2((max[r] - m) * scale_log2), there[r] = ptx::exp2((next.max[r] - m) * scale_log2);
            max[r] = m, sum[r] = sum[r] * here[r] + next.sum[r] * there[r];
        }
#pragma unroll
        for (int i = 0; i < quads; ++i) {
            const int r = fragment_row(4 * i);
            const float4 y = next.o[i];
            float4& x = o[i];
            x.x = x.x * here[r] + y.x * there[r], x.y = x.y * here[r] + y.y * there[r];
            x.z = x.z * here[r + 1] + y.z * there[r + 1], x.w = x.w * here[r + 1] + y.w * there[r + 1];
        }
    }
};
using Quarter = SoftmaxState<state_quads>;

// Where the four warps exchange what each found over its key tiles.
struct Strands {
    float4 o[4][4 * merge_quads][32];
    float4 max_sum[4][cfg::m_tiles_per_warp][32];
};
// Where a thread keeps its quarter, or fetches it to.
struct KeptState {
    float4 o[state_quads][128];
    float4 max_sum[cfg::m_tiles_per_warp][128];

    __device__ void put(const Quarter& state, u32 thread) {
#pragma unroll
        for (int i = 0; i < state_quads; ++i) o[i][thread] = state.o[i];
#pragma unroll
        for (int m = 0; m < cfg::m_tiles_per_warp; ++m) max_sum[m][thread] = state.max_sum(m);
    }
    __device__ Quarter get(u32 thread) const {
        Quarter state;
#pragma unroll
        for (int i = 0; i < state_quads; ++i) state.o[i] = o[i][thread];
#pragma unroll
        for (int m = 0; m < cfg::m_tiles_per_warp; ++m) state.set(m, max_sum[m][thread]);
        return state;
    }
};

// The same in global memory, for another block: the columns by thread, then maxima and sums, which all warps have, by row.
struct StateSlot {
    static constexpr int floats = state_quads * 512 + 32 * cfg::m_tiles_per_warp;
    float4* data;

    __device__ float4* o(int i, u32 thread) const { return data + i * 128 + thread; }
    __device__ float4* max_sum(int m, u32 thread) const { return data + state_quads * 128 + thread % 32 / 4 * cfg::m_tiles_per_warp + m; }
    __device__ void put(const Quarter& state, u32 thread) const {
#pragma unroll
        for (int i = 0; i < state_quads; ++i) *o(i, thread) = state.o[i];
        if (thread >= 32 || thread % 4 != 0) return;
#pragma unroll
        for (int m = 0; m < cfg::m_tiles_per_warp; ++m) *max_sum(m, thread) = state.max_sum(m);
    }
    // Starts the copy of the thread's quarter; only this thread will read it.
    __device__ void fetch(KeptState& to, u32 thread) const {
#pragma unroll
        for (int i = 0; i < state_quads; ++i) ptx::cp_async(ptx::smem_address(&to.o[i][thread]), o(i, thread));
#pragma unroll
        for (int m = 0; m < cfg::m_tiles_per_warp; ++m) ptx::cp_async(ptx::smem_address(&to.max_sum[m][thread]), max_sum(m, thread));
    }
};
