#pragma once
// A dense cache: sequence i is page i.
#include "variant/work_tile.cuh"

struct OnePage {
    const i32 batch;

    __device__ OnePage(const Args&, const WorkTile& work) : batch(work.batch) {}

    __device__ i32 row(i32 key) const { return key; }
    // The page of a key that the sequence has.
    __device__ i32 page(const Args&, i32, i64) const { return batch; }
    // The same while the launch before may still write page numbers: no page of the pool may be found, which is not said.
    __device__ i32 early_page(const Args&, i32, i64) const { return batch; }
};
