#pragma once
// Sequences that are cut to the rows that they use, from the first on: args.q_lens and args.kv_lens hold how many. No tile has the rows
// behind them, and where a tile ends later it holds zeros, as behind the end of a tensor: whatever lies there reaches no gradient. lse
// and scratch have places for all rows.
#include "tile/sequence.cuh"

template <class R>
struct CutKeys : R {
    __device__ CutKeys(const Args& args, i32 batch) : R(args, batch) {
        this->kv_len = this->kv.length = max(0, min(args.kv_lens[batch], this->kv_len));
    }
};

template <class R>
struct CutQueries : R {
    i32 q_len;  // R::q_len says where lse and scratch of the next sequence are

    __device__ CutQueries(const Args& args, i32 batch) : R(args, batch), q_len(max(0, min(args.q_lens[batch], R::q_len))) {
        this->q.length = q_len;
    }
    __device__ Extent extent() const {
        Extent found = R::extent();
        found.q_len = q_len;
        return found;
    }
    __device__ i32 shift(i32 to_last) const { return to_last * (this->kv_len - q_len); }
};
