#pragma once
// The keys of a step whose lists name rows of the cache: all rows of it.
#include "ptx/load.cuh"

struct EveryRow {
    __device__ static void prefetch(const Args&, i32) {}
    template <class Load = ptx::Load>
    __device__ static i32 of(const Args& args, i32, Load = {}) { return args.max_kv_len; }
};
