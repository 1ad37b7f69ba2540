#pragma once
// Rows of a step whose mask or score is a function: it sees positions in the sequence, whose last query stands at its last key.
#include "tile/sequence.cuh"

template <class R>
struct AtPositionsRows : R {
    i32 q_offset;  // below 0 where queries stand before the first key

    __device__ AtPositionsRows(const Args& args, i32 batch) : R(args, batch), q_offset(this->kv_len - this->queries) {}
    template <class Load>
    __device__ AtPositionsRows(const Args& args, i32 batch, Load load) : R(args, batch, load), q_offset(this->kv_len - this->queries) {}

    __device__ Extent extent() const { return {this->kv_len, this->kv_len, 0, 0}; }
};
