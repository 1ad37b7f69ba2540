#pragma once
// How many keys a sequence has: args.kv_lens.
#include "ptx/prefetch.cuh"

struct KvLens {
    __device__ static void prefetch(const Args& args, i32 batch) { ptx::prefetch_to_l2(args.kv_lens + batch); }
    __device__ static i32 of(const Args& args, i32 batch) { return args.kv_lens[batch]; }
};
