#pragma once
// What both orders of folding the splits of a work have: how a warpgroup of attn_decode_wide.cu holds and leaves what it found.
#include "tile/cut_work.cuh"

using Columns = float[cfg::head_dim_v / 2];  // of a thread
constexpr u32 fold_threads = 128 * cfg::consumers;

__device__ inline float4 four(const Columns& x, int i) { return make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]); }
__device__ inline void put_four(Columns& x, int i, const float4& from) {
    x[4 * i] = from.x, x[4 * i + 1] = from.y, x[4 * i + 2] = from.z, x[4 * i + 3] = from.w;
}

struct StatesOfSplits {
    const Args& args;
    const i32& border;  // at which the work's states are left
    const i32 strip;    // of this warp
    const i32 begin;    // of the work's splits
    const float scale_log2;

    __device__ static u32 thread() { return threadIdx.x - 128; }
    // A warp's state in global memory.
    __device__ static void put(float4* to, const MaxSum& found, const Columns& x) {
        const u32 own = thread() % 32;
#pragma unroll
        for (int i = 0; i < blocks; ++i) to[i * 32 + own] = four(x, i);
        if (own % 4 == 0) to[blocks * 32 + own / 4] = found.max_sum();
    }
    __device__ void leave(i32 place, const MaxSum& found, const Columns& x) const {
        put(state_at(args, border, min(place, args.slots - 1), strip), found, x);
    }
};
