#pragma once
// Which pairs of a thread's fragment are kept, whose rows are keys: eight of each block of 16 x 16, in their order in registers. They
// are found once, and asked for the weights and for their gradients.
#include "ptx/base.cuh"

template <int blocks>
struct KeptPairs {
    u32 bits[(blocks + 3) / 4];

    __device__ float operator()(float x, int block, int i) const { return bits[block / 4] >> (block % 4 * 8 + i) & 1 ? x : 0.f; }
};
struct EveryPair {
    __device__ float operator()(float x, int, int) const { return x; }
};
