#pragma once
// Keys are rows of the whole cache: page * cfg::listed_page_size + row.
#include "variant/work_tile.cuh"

struct PhysicalPages {
    __device__ PhysicalPages(const Args&, const WorkTile&) {}

    __device__ i32 row(i32 key) const { return key % cfg::listed_page_size; }
    __device__ i32 page(const Args&, i32 key, i64) const { return key / cfg::listed_page_size; }
    __device__ i32 early_page(const Args&, i32 key, i64) const { return key / cfg::listed_page_size; }
};
