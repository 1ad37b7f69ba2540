#pragma once
// Sequences that use a part of their keys, from the first on: args.kv_lens holds how many. Masks see that length. Keys and values behind
// are as if they were not there.
#include "tile/sequence.cuh"

template <class R>
struct UsedKeys : R {
    __device__ UsedKeys(const Args& args, i32 batch) : R(args, batch) {
        this->kv_len = max(0, min(args.kv_lens[batch], this->kv_len));
        cut(this->kv, this->kv_len);
    }
};
