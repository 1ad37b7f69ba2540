#pragma once
// A page table: args.page_table, (batch, pages of a sequence). Entries beyond a sequence's length are never read. An entry that is
// no page of the pool reads as zeros, and is said so.
#include "ptx/load.cuh"
#include "tile/checked_page.cuh"
#include "variant/work_tile.cuh"

struct PageTable {
    const i32* const table;
    const i32 shift;

    __device__ PageTable(const Args& args, const WorkTile& work)
        : table(args.page_table + work.batch * args.page_table_stride), shift(args.page_shift) {}

    __device__ i32 row(i32 key) const { return key & ((1 << shift) - 1); }
    // What the table says of a key that the sequence has, and the page that this is.
    __device__ i32 entry(const Args&, i32 key) const { return table[key >> shift]; }
    __device__ i32 page(const Args& args, i32 key, i64 count) const { return checked_page(args.violations, entry(args, key), count); }
    __device__ i32 early_page(const Args&, i32 key, i64 count) const {
        const i32 found = ptx::LoadFromL2{}(table + (key >> shift));
        return u64(i64(found)) < u64(count) ? found : i32(count);
    }
};
