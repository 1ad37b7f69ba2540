#pragma once
// A query keeps the keys of its own document; a position's is in an array, (batch, positions), from which it begins.
#include "function/pyramid.cuh"
#include "variant/work_tile.cuh"

struct Documents {
    static constexpr bool cheap = false;
    const Args& args;
    const i32 *doc, *pyramid;
    i32 q_len, kv_len, q_offset, kv_offset;

    __device__ Documents(const Args& args, const Rows& rows, const WorkTile& work)
        : args(args), doc(args.mask_0 + i64(work.batch) * args.mask_0_length), pyramid(args.mask_0_pyramid), q_len(rows.q_len),
          kv_len(rows.kv_len), q_offset(rows.q_offset), kv_offset(rows.kv_offset) {}

    __device__ function::Ints of(function::Ints at, i32 offset) const {
        const i64 batch = (doc - args.mask_0) / args.mask_0_length;
        return function::load(doc, args.mask_0_length, function::add(at, function::point(offset)), pyramid, batch);
    }
    __device__ i32 classify(function::Ints q, function::Ints, function::Ints kv) const {
        const auto kept = function::eq(of(q, q_offset), of(kv, kv_offset));
        return kept.hi ? 1 + kept.lo : 0;
    }
    struct Row {
        const i32* keys;  // from the first one on
        i32 own, left;

        __device__ bool keep(i32 offset) const { return offset < left && function::read(keys + offset) == own; }
    };
    __device__ Row row(i32 q, i32 first) const {
        return {doc + kv_offset + first, function::read(doc + function::inside(q + q_offset, args.mask_0_length)), kv_len - first};
    }
    struct Query { i32 own; };
    struct Key { i32 own; };
    __device__ Query query(i32 q) const { return {function::read(doc + min(q, q_len - 1) + q_offset)}; }
    __device__ Key key(i32 kv) const { return {function::read(doc + min(kv, kv_len - 1) + kv_offset)}; }
    __device__ bool keep(i32, i32 kv, const Query& query, const Key& key) const { return query.own == key.own && kv < kv_len; }
};
