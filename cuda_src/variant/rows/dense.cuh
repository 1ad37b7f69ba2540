#pragma once
// Sequences of one length: tensors (batch, length, heads, head_dim).
#include "tile/sequence.cuh"

struct Dense {
    static constexpr i32 q_offset = 0, kv_offset = 0;
    static constexpr bool is_cut = false;
    i32 q_len, kv_len, batch;
    BatchEntry q, kv;

    __device__ Dense(const Args& args, i32 batch) : q_len(args.q_len), kv_len(args.kv_len), batch(batch), q{batch}, kv{batch} {}

    __device__ static void say_cut(const Args&) {}
    // The sequence's first block of `rows` query rows in scratch that holds whole blocks of each sequence.
    template <int rows> __device__ i32 first_q_block() const { return batch * ((q_len + rows - 1) / rows); }
    __device__ Extent extent() const { return {q_len, kv_len, 0, 0}; }
    __device__ i32 shift(i32 to_last) const { return to_last * (kv_len - q_len); }
    __device__ i32 q_of(i32 row) const { return row; }
    __device__ i32 head_of(i32 head, i32) const { return head; }
    __device__ i64 offset(const Strides& of, i32 row, i32 head) const {
        return batch * of.batch + row * of.row + head * of.head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const {
        return (i64(batch) * args.heads + head) * q_len + row;
    }
};
