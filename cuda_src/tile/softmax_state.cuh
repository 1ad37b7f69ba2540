#pragma once
// This is what an online softmax has found over some keys for 16 rows, two of a quad, and how two such findings become one. Four warps share the columns:
// each has a quarter of the blocks of eight (tile/fragment.cuh), so none of them needs another's numbers.
#include "tile/max_sum.cuh"
#include "tile/range.cuh"
#include "tile/splits.cuh"

constexpr int quarter_blocks = ceil_div(cfg::head_dim_v, 32);  // four registers each; the last ones may lie past the end
constexpr int merge_blocks = quarter_blocks / cfg::merge_passes;
constexpr int groups_at_once = cfg::m_tiles == 1 ? 2 : 1;  // of states that are fetched from global memory
static_assert(quarter_blocks % cfg::merge_passes == 0);

template <int blocks>
struct SoftmaxState : MaxSum {
    float4 o[blocks];

    // Folds what was found over keys that follow.
    __device__ void fold(const SoftmaxState& next, float scale_log2) { fold(next, factors(next, scale_log2)); }
    __device__ void fold(const SoftmaxState& next, const Factors& by) {
        MaxSum::fold(next, by);
#pragma unroll
        for (int i = 0; i < blocks; ++i) ::fold(o[i], next.o[i], by);
    }
};
using Quarter = SoftmaxState<quarter_blocks>;
using FloatState = SoftmaxState<1>;  // one block of a lane's

// Where the four warps exchange what each found over its key tiles.
struct Strands {
    float4 o[4][4 * merge_blocks][32];
    float4 max_sum[4][32];
};
// Where a thread keeps its quarter, or fetches it to.
struct KeptState {
    float4 o[quarter_blocks][128];
    float4 max_sum[128];

    __device__ void put(const Quarter& state, u32 thread) {
#pragma unroll
        for (int i = 0; i < quarter_blocks; ++i) o[i][thread] = state.o[i];
        max_sum[thread] = state.max_sum();
    }
    __device__ Quarter get(u32 thread) const {
        Quarter state;
#pragma unroll
        for (int i = 0; i < quarter_blocks; ++i) state.o[i] = o[i][thread];
        state.set(max_sum[thread]);
        return state;
    }
    __device__ void fold(const Quarter& next, float scale_log2, u32 thread) {
        Quarter state = get(thread);
        state.fold(next, scale_log2);
        put(state, thread);
    }
};

// By these the states that a work's blocks left are multiplied when they become one, by quad. Those of a group's first state are of the
// group, whose maxima and sums are beside them.
struct PieceFactors {
    Factors of[cfg::most_pieces][8];
    float4 max_sum[cfg::most_pieces / split_group][8];
};

// A thread's quarter in global memory, for another block: the columns by thread, then maxima and sums, which all warps have, by quad.
struct StateSlot {
    static constexpr int floats = quarter_blocks * 512 + 32;
    static constexpr i32 stride = cfg::m_tiles * floats / 4;  // from one slot to the next, with those of a block's other rows between them
    float4* data;

    __device__ float4* o(int i, u32 thread) const { return data + i * 128 + thread; }
    __device__ float4* max_sum(u32 thread) const { return data + quarter_blocks * 128 + thread % 32 / 4; }
    __device__ void put(const Quarter& state, u32 thread) const {
#pragma unroll
        for (int i = 0; i < quarter_blocks; ++i) *o(i, thread) = state.o[i];
        if (thread < 32 && thread % 4 == 0) *max_sum(thread) = state.max_sum();
    }
};
