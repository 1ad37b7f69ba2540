#pragma once
// A work has all query heads of its key head, and its dk and dv are whole.
#include "variant/kv_work_tile.cuh"

struct WholeGroup {
    __device__ static i32 kv_head(const Args&, const KvWorkTile& work) { return work.kv_head; }
    __device__ static const StridedOutput& dk(const Args& args) { return args.dk; }
    __device__ static const StridedOutput& dv(const Args& args) { return args.dv; }
};
