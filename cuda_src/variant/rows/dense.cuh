#pragma once
// Sequences of one length: tensors (batch, length, heads, head_dim).
#include "tile/range.cuh"
#include "tile/sequence.cuh"

struct Dense {
    i32 q_len, kv_len, batch;
    BatchEntry q, kv;

    __device__ Dense(const Args& args, i32 batch) : q_len(args.q_len), kv_len(args.kv_len), batch(batch), q{batch}, kv{batch} {}

    // The sequence's first block of `rows` query rows in scratch that holds whole blocks of each sequence.
    template <int rows>
    __device__ i32 first_q_block() const { return batch * ceil_div(q_len, rows); }
    template <class A>  // a kernel need not have o
    __device__ i64 o_offset(const A& args, i32 row, i32 head) const {
        return batch * args.o_stride_batch + row * args.o_stride_row + head * args.o_stride_head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const {
        return (i64(batch) * args.heads + head) * q_len + row;
    }
};
