#pragma once
// What a table says of a page, as that page; `count`, where the pool has no such page, which is said so.
#include "tile/violated.cuh"

__device__ inline i32 checked_page(u32* violations, i32 entry, i64 count) {
    if (u64(i64(entry)) < u64(count)) return entry;
    atomicOr(violations, violated::page);
    return i32(count);
}
