#pragma once
// A work has one of args.group_parts parts of the query heads of its key head, where key heads alone are too few works. All that counts
// key heads counts parts, those of one key head side by side: args.heads_per_kv are the query heads of a part. Parts of dk and dv are
// left as sums in scratch, and a pass adds them in one order (attn_bwd_sum.cu).
#include "variant/group/parts.cuh"
#include "variant/kv_work_tile.cuh"

struct PartOfGroup {
    using Out = Number;

    __device__ static i32 kv_head(const Args& args, const KvWorkTile& work) { return work.kv_head / args.group_parts; }
    __device__ static StridedOutput dk(const Args& args) { return group_parts(args, args.dk_parts, cfg::head_dim); }
    __device__ static StridedOutput dv(const Args& args) { return group_parts(args, args.dv_parts, cfg::head_dim_v); }
};
