#pragma once
// Sequences of one length, whose few queries would leave a tile half empty: its rows are the queries of all heads that share a key
// head, one query after the other. Heads are those of k and v, then, and row r is query r / heads of head r % heads among them.
#include "tile/range.cuh"
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
    i32 q_len, kv_len, heads;  // q_len: rows
    PackGqaEntry q;
    BatchEntry kv;

    __device__ PackGqa(const Args& args, i32 batch)
        : q_len(args.q_len * args.pack_gqa_heads), kv_len(args.kv_len), heads(args.pack_gqa_heads), q{batch, heads}, kv{batch} {}

    // As the mask knows them: of each query once.
    __device__ PackGqa queries() const {
        PackGqa found = *this;
        found.q_len /= heads;
        return found;
    }
    __device__ i64 o_offset(const Args& args, i32 row, i32 head) const {
        return q.index * args.o_stride_batch + row / heads * args.o_stride_row + (head * heads + row % heads) * args.o_stride_head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const {
        return ((i64(q.index) * args.heads + head) * heads + row % heads) * args.q_len + row / heads;
    }
};

// The mask of a row is that of its query.
template <class M>
struct PackGqaMask {
    M mask;
    i32 heads;

    __device__ PackGqaMask(const Args& args, const PackGqa& rows) : mask(args, rows.queries()), heads(rows.heads) {}

    __device__ TileRange tiles(i32 begin, i32 end) const { return mask.tiles(begin / heads, (end - 1) / heads + 1); }
    __device__ KeptKeys row(i32 row, i32 first) const { return mask.row(row / heads, first); }
};
