#pragma once
// Sequences of one length, whose few queries would leave a tile half empty: its rows are the queries of all heads that share a key
// head, one query after the other. Heads are those of k and v, then, and row r is query r / heads of head r % heads among them.
#include "tile/range.cuh"
#include "tile/strided_tensor.cuh"
#include "variant/rows/dense.cuh"
#include "variant/work_tile.cuh"

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
    i32 q_len, kv_len, heads, queries;  // q_len: rows
    PackGqaEntry q;
    BatchEntry kv;

    __device__ PackGqa(const Args& args, i32 batch)
        : q_len(args.q_len * args.pack_gqa_heads), kv_len(args.kv_len), heads(args.pack_gqa_heads), queries(args.q_len),
          q{batch, heads}, kv{batch} {}

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

// An option that counts queries and knows one head, as each row needs it.
template <class Option, class R>
struct PackGqaOf {
    const Args& args;
    R rows;
    WorkTile work;

    __device__ PackGqaOf(const Args& args, const R& packed, const WorkTile& work) : args(args), rows(packed), work(work) {
        rows.q_len = rows.queries;
    }
    __device__ Option of(i32 row) const {
        WorkTile own = work;
        own.head = rows.head_of(work.head, row);
        return Option(args, rows, own);
    }
};

// A tile of rows has all heads of its queries, so where the masks of heads differ (M::of_head) it visits what any of them does.
template <class M, class R>
struct PackGqaMask : PackGqaOf<M, R> {
    using PackGqaOf<M, R>::PackGqaOf, PackGqaOf<M, R>::of, PackGqaOf<M, R>::rows;

    __device__ TileRange kv_tiles(i32 begin, i32 end) const {
        const i32 q_begin = rows.q_of(begin), q_end = rows.q_of(end - 1) + 1;
        TileRange found = of(0).kv_tiles(q_begin, q_end);
        if constexpr (requires { requires M::of_head; })
            for (i32 i = 1; i < rows.heads; ++i) found = found.either(of(i).kv_tiles(q_begin, q_end));
        return found;
    }
    __device__ auto row(i32 row, i32 first) const { return of(row).row(rows.q_of(row), first); }
};

template <class S, class R>
struct PackGqaScore : S {
    const PackGqaOf<S, R> packed;

    __device__ PackGqaScore(const Args& args, const R& rows, const WorkTile& work)
        : S(args, rows, work), packed(args, rows, work) {}

    __device__ Number operator()(Number s, i32 row, i32 kv) const { return packed.of(row)(s, packed.rows.q_of(row), kv); }
    __device__ Number derivative(Number s, i32 row, i32 kv) const { return packed.of(row).derivative(s, packed.rows.q_of(row), kv); }
};
