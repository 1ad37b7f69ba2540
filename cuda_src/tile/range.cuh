#pragma once
// This says which keys count.
#include "ptx/base.cuh"

__device__ constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// A tile of keys that is visited.
struct KeyTile {
    i32 index;
    bool full;  // it needs no mask
};

// This says which keys a query keeps of those from some first one on: offsets [before, end).
struct KeptKeys {
    i32 before, end;

    __device__ bool keep(i32 offset) const { return offset >= before && offset < end; }
};

// The key tiles that some queries visit, or the query tiles that some keys do: [begin, end), of which [full_begin, full_end) need no
// mask.
struct TileRange {
    i32 begin, full_begin, full_end, end;

    // The tiles of keys [key_begin, key_end), full where every row keeps keys [full_key_begin, full_key_end).
    __device__ static TileRange of_keys(i32 key_begin, i32 full_key_begin, i32 full_key_end, i32 key_end) {
        if (key_begin >= key_end) return {0, 0, 0, 0};
        const i32 begin = key_begin / cfg::tile_kv, end = ceil_div(key_end, cfg::tile_kv);
        const i32 full_begin = min(ceil_div(full_key_begin, cfg::tile_kv), end);
        return {begin, full_begin, max(full_begin, full_key_end / cfg::tile_kv), end};
    }
    // The tiles of queries [q_begin, q_end), full where every query is one of [full_begin, full_end), of q_len in all. Queries past
    // the last one do not count.
    __device__ static TileRange of_queries(i32 q_begin, i32 full_begin, i32 full_end, i32 q_end, i32 q_len) {
        q_begin = max(q_begin, 0), q_end = min(q_end, q_len);
        if (q_begin >= q_end) return {0, 0, 0, 0};
        const i32 begin = q_begin / cfg::tile_q, end = ceil_div(q_end, cfg::tile_q);
        const i32 from = min(ceil_div(max(full_begin, 0), cfg::tile_q), end);
        return {begin, from, max(from, full_end >= q_len ? end : max(full_end, 0) / cfg::tile_q), end};
    }
    // This is what one or the other visits; full is what both have full.
    __device__ TileRange either(TileRange y) const {
        if (begin >= end) return {y.begin, y.end, y.end, y.end};
        if (y.begin >= y.end) return {begin, end, end, end};
        return {min(begin, y.begin), max(full_begin, y.full_begin), min(full_end, y.full_end), max(end, y.end)};
    }
    __device__ bool is_full(i32 tile) const { return tile >= full_begin && tile < full_end; }
};
