#pragma once
// Sequences that use a part of their rows, from the first on: args.kv_lens and args.q_lens hold how many. Masks see these lengths.
// Queries that are not used are computed as rows that keep no key (variant/mask/used_queries.cuh), so that they have o and lse.
#include "tile/range.cuh"

template <class R>
struct UsedKeys : R {
    __device__ UsedKeys(const Args& args, i32 batch) : R(args, batch) { this->kv_len = max(0, min(args.kv_lens[batch], this->kv_len)); }
};

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
