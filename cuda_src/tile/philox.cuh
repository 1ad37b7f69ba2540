#pragma once
// Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, where seven rounds pass BigCrush): 128 random bits
// that are a pure function of a counter, by a key. It has no state.
#include "ptx/base.cuh"

struct Philox {
    static constexpr u32 m0 = 0xd2511f53u, m1 = 0xcd9e8d57u, step_low = 0x9e3779b9u, step_high = 0xbb67ae85u;
    static constexpr u32 rounds = 7;
    u32 low, high;  // the key

    struct Words { u32 x[4]; };
    struct Pair { u32 x[2]; };

    // Where a and c are the same for many calls, and either b or d, their products are so in the first three rounds, but for one of
    // the second and one of the third: the compiler makes ten products of 14.
    __device__ Words operator()(u32 a, u32 b, u32 c, u32 d) const {
        Words x = {a, b, c, d};
        advance<rounds>(x);
        return x;
    }
    // Its last two words, or the first two, with one product less.
    __device__ Pair half(u32 a, u32 b, u32 c, u32 d, bool last) const {
        Words x = {a, b, c, d};
        advance<rounds - 1>(x);
        const u64 product = u64(last ? m0 : m1) * (last ? x.x[0] : x.x[2]);
        const u32 key = last ? high + (rounds - 1) * step_high : low + (rounds - 1) * step_low;
        return {u32(product >> 32) ^ key ^ (last ? x.x[3] : x.x[1]), u32(product)};
    }

   private:
    template <u32 count>
    __device__ void advance(Words& x) const {
        u32 key_low = low, key_high = high;
#pragma unroll
        for (u32 round = 0; round < count; ++round) {
            const u64 a = u64(m0) * x.x[0], c = u64(m1) * x.x[2];
            x = {u32(c >> 32) ^ key_low ^ x.x[1], u32(c), u32(a >> 32) ^ key_high ^ x.x[3], u32(a)};
            key_low += step_low, key_high += step_high;
        }
    }
};
