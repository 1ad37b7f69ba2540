#pragma once
// This is how many keys a sequence has: args.kv_lens.
#include "ptx/load.cuh"
#include "ptx/prefetch.cuh"

struct KvLens {
    __device__ static void prefetch(const Args& args, i32 batch) { ptx::prefetch_to_l2(args.kv_lens + batch); }
    template <class Load = ptx::Load>
    __device__ static i32 of(const Args& args, i32 batch, Load load = {}) { return load(args.kv_lens + batch); }
};
