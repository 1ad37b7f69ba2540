#pragma once
// How many keys a sequence has: args.kv_lens.

struct KvLens {
    __device__ static i32 of(const Args& args, i32 batch) { return args.kv_lens[batch]; }
};
