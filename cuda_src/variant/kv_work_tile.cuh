#pragma once
// This says which part of a head a block of the backward computes: the keys of a tile, for all query heads that share them; and in which
// directions blocks go over key tiles, and each block over query tiles. The schedule makes it, everybody reads it.
#include "ptx/base.cuh"

struct KvWorkTile {
    i32 batch, kv_head, kv_tile, kv_ascends, q_ascends;
    __device__ bool is_last() const { return batch < 0; }  // there is no more work
};
