#pragma once
// Packed keys, (total, heads, head_dim), as one page: those of a sequence begin at args.cu_seqlens_kv[batch].
#include "variant/work_tile.cuh"

struct PackedKeys {
    const i32 first;

    __device__ PackedKeys(const Args& args, const WorkTile& work) : first(max(0, min(args.cu_seqlens_kv[work.batch], args.total_kv))) {}

    __device__ i32 row(i32 key) const { return first + key; }
    __device__ i32 page(const Args&, i32, i64) const { return 0; }
    __device__ i32 early_page(const Args&, i32, i64) const { return 0; }
};
