#pragma once
// As many queries for each sequence: (batch, length, heads, head_dim).
#include "variant/rows/cache.cuh"

struct SameQueries {
    using Place = BatchEntry;

    template <class Load>
    __device__ static QuerySpan of(const Args& args, i32 batch, Load) { return {batch, 0, args.q_len, args.q_len, false}; }
    __device__ static Place place(const QuerySpan& span) { return {span.batch}; }
};
