#pragma once
// A work has one of args.group_parts parts of the query heads of its key head, where key heads alone are too few works. All that counts
// key heads counts parts, those of one key head side by side: args.heads_per_kv are the query heads of a part. Parts of dk and dv are
// left as sums in scratch, (parts of all key heads, rows of all sequences, columns), and a pass adds them in one order (attn_bwd_sum.cu).
#include "tile/strided_tensor.cuh"
#include "variant/kv_work_tile.cuh"

struct PartOfGroup {
    __device__ static i32 kv_head(const Args& args, const KvWorkTile& work) { return work.kv_head / args.group_parts; }
    __device__ static StridedOutput dk(const Args& args) { return rows(args, args.dk_parts, cfg::head_dim); }
    __device__ static StridedOutput dv(const Args& args) { return rows(args, args.dv_parts, cfg::head_dim_v); }
    __device__ static StridedOutput rows(const Args& args, Number* parts, i64 columns) {
        const i64 row_bytes = columns * sizeof(Number);
        return {reinterpret_cast<unsigned char*>(parts), args.batch_rows * row_bytes, row_bytes, args.part_rows * row_bytes};
    }
};
