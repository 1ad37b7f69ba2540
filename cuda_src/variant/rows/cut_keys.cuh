#pragma once
// Sequences whose keys are cut to those that they use, from the first on: args.kv_lens holds how many. No tile has the rows behind them,
// and where a tile ends later it holds zeros, as behind the end of a tensor: whatever lies there reaches no gradient.
#include "tile/sequence.cuh"

template <class R>
struct CutKeys : R {
    __device__ CutKeys(const Args& args, i32 batch) : R(args, batch) {
        this->kv_len = this->kv.length = max(0, min(args.kv_lens[batch], this->kv_len));
    }
};
