#pragma once
// What blocks of attn_decode_wide.cu found of parts of works that are cut, for attn_decode_fold.cu, and how both store what is whole.
#include "tile/max_sum.cuh"
#include "tile/store_fragment.cuh"

constexpr int blocks = cfg::head_dim_v / 8;  // of a fragment's columns

// Where the state of a strip lies, sixteen rows: a fragment's blocks, four numbers of each lane together, then maxima and sums. A border
// has args.slots places. From those at the border behind the block that a cut work begins in, place 0 is for the state of its first
// splits, and place n for that of the nth split from its end. A work that more blocks have parts of goes on to the places of the borders
// that it lies across.
__device__ inline float4* state_at(const Args& args, i32 border, i32 place, i32 strip) {
    const u32 slot = min(u32(border * args.slots + place), u32(max(1, args.borders) * args.slots - 1));  // also where lengths were torn
    return reinterpret_cast<float4*>(args.partials) + (i64(slot) * args.strips + strip) * (blocks * 32 + 8);
}

// Stores a warp's columns of a strip whose upmost row of this thread is `row`. All lanes of a quad know the sums.
template <class Store, int n>
__device__ void store_strip(const Store& store, const Args& args, const Rows& rows, const WorkTile& work, i32 row, const MaxSum& found, const float (&x)[n], float scale_log2) {
    Softmax whole(args, rows, work, scale_log2);
#pragma unroll
    for (int r = 0; r < 2; ++r) whole.max[r] = found.max[r], whole.sum[r] = threadIdx.x % 4 ? 0.f : found.sum[r];
    store_fragment(store, whole, x, row, rows.q_len, 1.f);
}
