#pragma once
// Sequences that use a part of their queries, from the first on: args.q_lens holds how many. In the backward the others are as if they
// were not there: no tile has them, and where one ends later it holds zeros, so that whatever lies there reaches no gradient. lse and
// scratch have places for all rows.
#include "tile/sequence.cuh"

template <class R>
struct CutQueries : R {
    i32 q_len;  // R::q_len says where lse and scratch of the next sequence are

    __device__ CutQueries(const Args& args, i32 batch) : R(args, batch), q_len(max(0, min(args.q_lens[batch], R::q_len))) {
        cut(this->q, q_len);
    }
    __device__ Extent extent() const {
        Extent found = R::extent();
        found.q_len = q_len;
        return found;
    }
    __device__ i32 shift(i32 to_last) const { return to_last * (this->kv_len - q_len); }
};
