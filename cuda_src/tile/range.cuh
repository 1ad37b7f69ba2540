#pragma once
// Which keys count.
#include "ptx/base.cuh"

__device__ constexpr i32 ceil_div(i32 a, i32 b) { return (a + b - 1) / b; }

// Which keys a query keeps of those from some first one on: offsets [before, end).
struct KeptKeys {
    i32 before, end;

    __device__ bool keep(i32 offset) const { return offset >= before && offset < end; }
};

// The key tiles that a query tile visits: [begin, end), of which [full_begin, full_end) need no mask.
struct TileRange {
    i32 begin, full_begin, full_end, end;

    // The tiles of keys [key_begin, key_end), full where every row keeps keys [full_key_begin, full_key_end).
    __device__ static TileRange of_keys(i32 key_begin, i32 full_key_begin, i32 full_key_end, i32 key_end) {
        if (key_begin >= key_end) return {0, 0, 0, 0};
        const i32 begin = key_begin / cfg::tile_kv, end = ceil_div(key_end, cfg::tile_kv);
        const i32 full_begin = min(ceil_div(full_key_begin, cfg::tile_kv), end);
        return {begin, full_begin, max(full_begin, full_key_end / cfg::tile_kv), end};
    }
    __device__ bool is_full(i32 tile) const { return tile >= full_begin && tile < full_end; }
};
