#pragma once
// Blocks of queries with lists of keys (variant/lists/key_list.cuh): each is a sequence of its own to a kernel, `batch` is its number,
// and its keys are those of the list. Rows are its queries, for each of them the args.listed_heads heads that share a list. What masks and
// scores see is the real sequence, whole().
#include "tile/keys.cuh"
#include "tile/rows_upto.cuh"
#include "tile/sequence.cuh"
#include "tile/violated.cuh"

struct QueryBlock { i32 sequence, first; };  // the first of its queries

template <class Place>
struct ListedEntry {  // rows of a block, whose sequence lies at `place`
    Place place;
    i32 first, heads;
};
template <class Rows>
struct ListedMatrix {
    Rows rows;
    i64 head_bytes;
    i32 first, heads;

    __device__ const unsigned char* row(i32 i) const { return rows.row(first + i / heads) + i % heads * head_bytes; }
};
template <class Place>
__device__ auto matrix_of(const StridedTensor& tensor, const ListedEntry<Place>& at, i32 head) {
    const auto rows = matrix_of(tensor, at.place, head * at.heads);
    return ListedMatrix<decltype(rows)>{rows, tensor.head_bytes, at.first, at.heads};
}
template <class Place>
__device__ auto rows_upto(const StridedTensor& tensor, const ListedEntry<Place>& at, i32 head, i32 last) {
    const auto rows = any_matrix_of(tensor, at.place, head * at.heads);
    const ListedMatrix<decltype(rows)> of_block{rows, tensor.head_bytes, at.first, at.heads};
    return MatrixRowsUpto<decltype(of_block)>{of_block, last};
}

template <class R, class Place>
struct ListedRows : R {
    using Keys = KeysBefore;
    static constexpr bool is_cut = false;
    i32 sequence, first, heads, q_len, kv_len;
    ListedEntry<decltype(R::q)> q;

    __device__ ListedRows(const Args& args, i32 block) : ListedRows(args, Place::of(args, block)) {}
    template <class Load>
    __device__ ListedRows(const Args& args, i32 block, Load load) : ListedRows(args, Place::of(args, block), load) {}
    template <class... Load>
    __device__ ListedRows(const Args& args, QueryBlock at, Load... load)
        : R(args, at.sequence, load...), sequence(at.sequence), first(at.first), heads(args.listed_heads),
          q{R::q, at.first, args.listed_heads} {
        const i32 queries = R::is_cut ? 0 : max(0, min(R::q_len - first, cfg::listed_block_q));
        q_len = queries * heads, kv_len = queries > 0 && R::kv_len > 0 ? args.listed * cfg::listed_block_kv : 0;
    }
    __device__ ListedRows whole() const {
        ListedRows rows = *this;
        rows.q_len = R::q_len, rows.kv_len = R::kv_len;
        return rows;
    }
    __device__ static void prefetch(const Args&) {}
    // Says what is wrong with the sequence.
    __device__ void report(const Args& args) const {
        if constexpr (requires(const R& r) { r.violations; })
            if (R::violations) atomicOr(args.violations, R::violations);
        if (R::is_cut) R::say_cut(args);
    }
    __device__ Keys keys() const { return {kv_len}; }
    __device__ i32 q_of(i32 row) const { return first + row / heads; }
    __device__ i32 head_of(i32 head, i32 row) const { return head * heads + row % heads; }
    __device__ i64 offset(const Strides& of, i32 row, i32 head) const { return R::offset(of, q_of(row), head_of(head, row)); }
    // R counts args.heads heads of a sequence, and there are `heads` times as many.
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const {
        const i32 before = cfg::listed_ragged ? 0 : sequence * args.heads * (heads - 1);
        return R::lse_offset(args, q_of(row), head_of(head, row) + before);
    }
};
