#pragma once
// A block of queries is a row of packed queries, whose sequence args.cu_seqlens_q tells.
#include "variant/rows/listed.cuh"

struct RowsOfSequences {
    // The last of the sequences that begin at the row or before; a row behind the last sequence is beyond that one's queries.
    __device__ static QueryBlock of(const Args& args, i32 row) {
        i32 first = 0, count = args.listed_sequences;
        while (count > 1) {
            const i32 half = count / 2;
            const bool is_upper = args.cu_seqlens_q[first + half] <= row;
            first += is_upper ? half : 0, count = is_upper ? count - half : half;
        }
        return {first, row - args.cu_seqlens_q[first]};
    }
};
