#pragma once
// A warp adds a number of each lane to its element's exact sum. Lanes that have one element add together before: at first those that
// have the first lane's, and so on for four elements.
#include "tile/lane_sum.cuh"
#include "variant/pair_row.cuh"

// A call of its own: it is long, and seldom.
__device__ __noinline__ inline void add_exactly(const Args& args, i64 element, Number x) { Sums::add(args, element, x); }

__device__ inline void add_matching(const Args& args, i64 own, Number x) {
    const int lane = threadIdx.x % 32;
    u32 left = __ballot_sync(0xffffffffu, x != Number(0));
#pragma unroll 1
    for (int n = 0; n < 4 && left; ++n) {
        const int first = __ffs(left) - 1;
        const i64 wanted = __shfl_sync(0xffffffffu, own, first);
        const bool same = left >> lane & 1 && own == wanted;
        const Number sum = lane_sum<1, 32>(same ? x : Number(0));
        if (lane == first) add_exactly(args, own, sum);
        left &= ~__ballot_sync(0xffffffffu, same);
    }
    if (left >> lane & 1) add_exactly(args, own, x);
}
