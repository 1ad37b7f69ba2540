#pragma once
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): 128 random bits that are a pure function of
// a counter, by a key. It has no state.
#include "ptx/base.cuh"

struct Philox {
    u32 low, high;  // the key

    struct Words { u32 x[4]; };

    __device__ Words operator()(u32 a, u32 b, u32 c, u32 d) const {
        u32 key_low = low, key_high = high;
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const u64 x = u64(0xd2511f53u) * a, y = u64(0xcd9e8d57u) * c;
            a = u32(y >> 32) ^ b ^ key_low, b = u32(y), c = u32(x >> 32) ^ d ^ key_high, d = u32(x);
            key_low += 0x9e3779b9u, key_high += 0xbb67ae85u;
        }
        return {a, b, c, d};
    }
};
