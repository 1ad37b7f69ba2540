#pragma once
// This says which pairs of a thread's fragment are kept, whose rows are keys: eight of each block of 16 x 16. They are found once, and asked for
// the weights and for their gradients.
#include "ptx/base.cuh"

// Four blocks have a word, whose lower half is of the upper eight queries of each. Numbers are shifted in from the left.
template <int blocks>
struct KeptWeights {
    u32 bits[(blocks + 3) / 4];

    __device__ float operator()(float x, int block, int i) const {
        const int in_word = min(4, blocks - block / 4 * 4), at = 16 - 4 * in_word + block % 4 * 4 + i % 4;
        return bits[block / 4] >> (at + i / 4 * 16) & 1 ? x : 0.f;
    }
    // The same for a second use: else the compiler finds a bit once for both, and keeps 32 predicates in between.
    __device__ KeptWeights again() const {
        KeptWeights found;
#pragma unroll
        for (int i = 0; i < (blocks + 3) / 4; ++i) found.bits[i] = ptx::opaque(bits[i]);
        return found;
    }
};
// Shifts a number into each half: the highest bit of each half of `pairs`.
__device__ inline void add_pairs(u32& bits, u32 pairs) { bits = bits >> 1 & 0x7fff7fff | pairs & 0x80008000; }

struct EveryWeight {
    __device__ float operator()(float x, int, int) const { return x; }
    __device__ EveryWeight again() const { return {}; }
};
