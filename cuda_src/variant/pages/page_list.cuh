#pragma once
// Pages of all sequences end to end: those of a sequence begin at args.indptr[batch] of args.indices. An entry that is no page of the
// pool, and one that is not there, is said so.
#include "ptx/load.cuh"
#include "tile/checked_page.cuh"
#include "variant/work_tile.cuh"

struct PageList {
    const i32 first, shift;

    __device__ PageList(const Args& args, const WorkTile& work) : first(ptx::LoadFromL2{}(args.indptr + work.batch)), shift(args.page_shift) {}

    __device__ i32 row(i32 key) const { return key & ((1 << shift) - 1); }
    // What the list says of a key that the sequence has, and the page that this is.
    __device__ i32 entry(const Args& args, i32 key) const {
        const i64 at = i64(first) + (key >> shift);
        return at >= 0 && at < args.indices_count ? args.indices[at] : -1;
    }
    __device__ i32 page(const Args& args, i32 key, i64 count) const { return checked_page(args.violations, entry(args, key), count); }
    __device__ i32 early_page(const Args& args, i32 key, i64 count) const {
        const i64 at = i64(first) + (key >> shift);
        const i32 found = at >= 0 && at < args.indices_count ? ptx::LoadFromL2{}(args.indices + at) : -1;
        return u64(i64(found)) < u64(count) ? found : i32(count);
    }
};
