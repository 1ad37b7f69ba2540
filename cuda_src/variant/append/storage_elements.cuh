#pragma once
// The cache holds a number for each number, S::of of it, in KvElement.
#include "tile/number.cuh"

template <class S>
struct ElementStorage {
    // Stores the strip i of a row, from its column on.
    template <class Chunk, int strips, class Scale>
    __device__ static void store(unsigned char* row, int column, const Chunk (&chunks)[strips], int i, Scale scale) {
        Vector<KvElement, cfg::width> out;
#pragma unroll
        for (int x = 0; x < cfg::width; ++x) out.x[x] = S::of(chunks[i].x[x], scale);
        *reinterpret_cast<decltype(out)*>(row + column * sizeof(KvElement)) = out;
    }
};
