#pragma once
// Which part of a head a block computes: query rows from q_begin on. The schedule makes it, everybody reads it.
#include "ptx/base.cuh"

struct WorkTile {
    i32 batch, head, q_begin;
    __device__ bool is_last() const { return batch < 0; }  // there is no more work
};
