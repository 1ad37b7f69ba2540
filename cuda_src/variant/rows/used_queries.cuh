#pragma once
// Sequences that use a part of their queries, from the first on: args.q_lens holds how many. Masks see that length. The others are
// computed as rows that keep no key (variant/mask/used_queries.cuh), so that they have o and lse.
#include "tile/sequence.cuh"

template <class R>
struct UsedQueries : R {
    i32 used;

    __device__ UsedQueries(const Args& args, i32 batch) : R(args, batch), used(max(0, min(args.q_lens[batch], this->q_len))) {}

    __device__ Extent extent() const {
        Extent found = R::extent();
        found.q_len = used;
        return found;
    }
    __device__ i32 shift(i32 to_last) const { return to_last * (this->kv_len - used); }
};
