#pragma once
// This says which part of a head a block computes: query rows from q_begin on, over one split of their keys. The scheduler makes it, and
// everybody reads it.
#include "ptx/base.cuh"

struct WorkTile {
    i32 batch, head, q_begin, split;
    __device__ bool is_last() const { return batch < 0; }  // there is no more work
};
