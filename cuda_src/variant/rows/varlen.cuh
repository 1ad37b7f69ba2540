#pragma once
// Sequences end to end: tensors (total, heads, head_dim); cu_seqlens hold where each begins.
#include "tile/sequence.cuh"

struct Varlen {
    static constexpr i32 q_offset = 0, kv_offset = 0;
    i32 q_len, kv_len, batch;
    RowSpan q, kv;

    __device__ Varlen(const Args& args, i32 batch)
        : q_len(args.cu_seqlens_q[batch + 1] - args.cu_seqlens_q[batch]),
          kv_len(args.cu_seqlens_kv[batch + 1] - args.cu_seqlens_kv[batch]),
          batch(batch), q{args.cu_seqlens_q[batch], q_len}, kv{args.cu_seqlens_kv[batch], kv_len} {}

    // The sequence's first block of `rows` query rows in scratch that holds whole blocks of each sequence. There is a place for each
    // without adding up the blocks of those before it, since a / n + ceil(b / n) <= (a + b) / n + 1: total_q / n + batches in all.
    template <int rows> __device__ i32 first_q_block() const { return q.first / rows + batch; }
    __device__ Extent extent() const { return {q_len, kv_len, q.first, kv.first}; }
    __device__ i32 shift(i32 to_last) const { return to_last * (kv_len - q_len); }
    __device__ i32 q_of(i32 row) const { return row; }
    __device__ i32 head_of(i32 head, i32) const { return head; }
    __device__ i64 offset(const Strides& of, i32 row, i32 head) const {
        return (q.first + row) * of.row + head * of.head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const { return i64(head) * args.total_q + q.first + row; }
};
