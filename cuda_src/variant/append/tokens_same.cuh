#pragma once
// As many new rows for each sequence: (batch, rows, heads, columns).
#include "tile/sequence.cuh"

struct SameTokens {
    i32 batch, row, q_len;  // of q_len rows that the sequence has
    BatchEntry entry;
    static constexpr bool exists = true;

    __device__ SameTokens(const Args& args, i32 token)
        : batch(token / args.q_len), row(token % args.q_len), q_len(args.q_len), entry{batch} {}
};
