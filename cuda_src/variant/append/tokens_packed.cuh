#pragma once
// New rows end to end, (total, heads, columns): cu_seqlens_q hold where each sequence begins. A row that is behind the last of them
// has no sequence.
#include "tile/search.cuh"
#include "tile/sequence.cuh"
#include "tile/violated.cuh"

struct PackedTokens {
    i32 batch, row, q_len;  // of q_len rows that the sequence has
    RowSpan entry;
    bool exists;

    __device__ PackedTokens(const Args& args, i32 token) : batch(find_last(args.cu_seqlens_q, args.batches, token)) {
        const i32 first = args.cu_seqlens_q[batch];
        row = token - first, q_len = args.cu_seqlens_q[batch + 1] - first, entry = {first, q_len};
        exists = row >= 0 && row < q_len;
        if (exists && q_len > args.max_q_len) atomicOr(args.violations, violated::q_len), exists = false;
    }
};
