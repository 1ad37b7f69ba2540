#pragma once
// Sequences of one length, whose few queries would leave a tile half empty: its rows are the queries of all heads that share a key
// head, one query after the other. Heads are those of k and v, then, and row r is query r / heads of head r % heads among them.
#include "tile/strided_tensor.cuh"
#include "variant/rows/dense.cuh"

struct PackGqaEntry { i32 index, heads; };  // in (batch, rows, heads, columns)

struct PackGqaMatrix {
    const unsigned char* data;
    i64 row_bytes, head_bytes;
    i32 heads;

    __device__ const unsigned char* row(i32 i) const { return data + i / heads * row_bytes + i % heads * head_bytes; }
};
__device__ inline PackGqaMatrix matrix_of(const StridedTensor& tensor, PackGqaEntry at, i32 head) {
    return {tensor.rows(BatchEntry{at.index}, head * at.heads), tensor.row_bytes, tensor.head_bytes, at.heads};
}

struct PackGqa {
    static constexpr i32 q_offset = 0, kv_offset = 0;
    static constexpr bool is_cut = false;
    i32 q_len, kv_len, heads, queries;  // q_len: rows
    PackGqaEntry q;
    BatchEntry kv;

    __device__ PackGqa(const Args& args, i32 batch)
        : q_len(args.q_len * args.pack_gqa_heads), kv_len(args.kv_len), heads(args.pack_gqa_heads), queries(args.q_len),
          q{batch, heads}, kv{batch} {}

    __device__ static void say_cut(const Args&) {}
    __device__ Extent extent() const { return {queries, kv_len, 0, 0}; }
    __device__ i32 shift(i32 to_last) const { return to_last * (kv_len - queries); }
    __device__ i32 q_of(i32 row) const { return row / heads; }
    __device__ i32 head_of(i32 head, i32 row) const { return head * heads + row % heads; }
    __device__ i64 offset(const Strides& of, i32 row, i32 head) const {
        return q.index * of.batch + row / heads * of.row + (head * heads + row % heads) * of.head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const {
        return ((i64(q.index) * args.heads + head) * heads + row % heads) * args.q_len + row / heads;
    }
};
