#pragma once
// Sequences end to end: tensors (total, heads, head_dim); cu_seqlens hold where each begins. What lies outside of the tensors is cut.
#include "tile/sequence.cuh"
#include "tile/violated.cuh"

struct Varlen {
    static constexpr i32 q_offset = 0, kv_offset = 0;
    i32 q_len, kv_len, batch;
    RowSpan q, kv;
    bool is_cut;

    __device__ Varlen(const Args& args, i32 batch)
        : batch(batch), q(within(args.cu_seqlens_q + batch, args.total_q)), kv(within(args.cu_seqlens_kv + batch, args.total_kv)) {
        q_len = q.length, kv_len = kv.length;
        is_cut = !(is_within(args.cu_seqlens_q + batch, args.total_q) & is_within(args.cu_seqlens_kv + batch, args.total_kv));
    }
    __device__ static RowSpan within(const i32* begin, i32 rows) {
        const i32 end = max(0, min(begin[1], rows)), first = max(0, min(begin[0], end));  // this form spills least (NVRTC 13.0, sm_80)
        return {first, end - first};
    }
    __device__ static bool is_within(const i32* begin, i32 rows) { return 0 <= begin[0] & begin[0] <= begin[1] & begin[1] <= rows; }

    // A schedule leaves out the first sequence that is cut and all behind it, so that no two that it hands out have rows or scratch in common:
    // blocks would wait for turns that never come.
    __device__ static void say_cut(const Args& args) { atomicOr(args.violations, violated::cu_seqlens); }
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
