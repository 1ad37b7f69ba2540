#pragma once
// The queries of a step over cached keys: their lengths lie on the device. Rows are the queries of all heads that share a key head,
// one query after the other, as in variant/rows/pack_gqa.cuh. A length beyond what the host knows of is cut, and said so.
#include "ptx/load.cuh"
#include "tile/keys.cuh"
#include "tile/range.cuh"
#include "tile/sequence.cuh"
#include "tile/violated.cuh"

struct QuerySpan {
    i32 batch, first, length;  // in (batch, length, heads, columns)
    i32 lse_length;            // queries from one head of lse to the next
    bool cut;
};

template <class Queries, class Lengths>
struct CacheRows {
    static constexpr i32 q_offset = 0, kv_offset = 0;
    static constexpr bool is_cut = false;
    using Keys = KeysBefore;
    struct Seen { i32 kv_len, q_len, q_begin; };  // what a schedule follows from, and where its first queries are
    QuerySpan q;
    BatchEntry kv;
    i32 q_len, kv_len, heads, queries;  // q_len: rows
    u32 violations;

    __device__ CacheRows(const Args& args, i32 batch) : CacheRows(args, batch, ptx::Load{}) {}
    template <class Load>
    __device__ CacheRows(const Args& args, i32 batch, Load load) : q(Queries::of(args, batch, load)), kv{batch}, heads(args.pack_gqa_heads) {
        const i32 length = Lengths::of(args, batch, load);
        kv_len = max(0, min(length, args.max_kv_len)), queries = q.length, q_len = queries * heads;
        violations = (kv_len != length ? violated::kv_len : 0) | (q.cut ? violated::q_len : 0);
    }

    // By a warp, while the launch before this one may still write the lengths: each lane asks for a line of 32.
    __device__ static void prefetch(const Args& args) {
        const i32 batch = threadIdx.x % 32 * 32;
        if (batch < args.batches) Lengths::prefetch(args, batch);
    }
    __device__ static void say_cut(const Args&) {}
    __device__ Keys keys() const { return {kv_len}; }
    __device__ Seen seen() const { return {kv_len, q_len, q.first}; }
    __device__ bool is(const Seen& seen) const { return kv_len == seen.kv_len && q_len == seen.q_len && q.first == seen.q_begin; }
    __device__ Extent extent() const { return {queries, kv_len, q.first, 0}; }
    __device__ i32 shift(i32 to_last) const { return to_last * (kv_len - queries); }
    __device__ i32 q_of(i32 row) const { return row / heads; }
    __device__ i32 head_of(i32 head, i32 row) const { return head * heads + row % heads; }
    __device__ i64 offset(const Strides& of, i32 row, i32 head) const {
        return q.batch * of.batch + (q.first + q_of(row)) * of.row + head_of(head, row) * of.head;
    }
    __device__ i64 lse_offset(const Args& args, i32 row, i32 head) const {
        return (i64(q.batch) * args.heads * heads + head_of(head, row)) * q.lse_length + q.first + q_of(row);
    }
};
