#pragma once
// Packed queries, (total, heads, head_dim); cu_seqlens_q hold where each sequence begins.
#include "variant/rows/cache.cuh"

struct PackedQueries {
    using Place = RowSpan;

    template <class Load>
    __device__ static QuerySpan of(const Args& args, i32 batch, Load load) {
        const i32 begin = load(args.cu_seqlens_q + batch), end = load(args.cu_seqlens_q + batch + 1);
        const i32 first = max(0, min(begin, args.total_q)), length = max(0, min(end, args.total_q) - first);
        const i32 most = min(length, args.max_q_len);
        return {0, first, most, args.total_q, first != begin || first + most != end};
    }
    __device__ static Place place(const QuerySpan& span) { return {span.first, span.length}; }
};
