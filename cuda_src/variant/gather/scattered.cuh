#pragma once
// The gradient of an array whose element follows from a query and a key in any way, as a table of their distance: each pair's is added
// to the element's exact sum. Lanes of a warp that have one element add together before: at first those that have the first lane's,
// and so on for four elements.
#include "tile/lane_sum.cuh"

struct Scattered {
    struct Shared {};

    __device__ Scattered(const Args& args, Shared&) : args(args) {}

    template <class Element>
    __device__ void add(int, int, Number x, Element element) {
        const i64 own = element();
        const int lane = threadIdx.x % 32;
        u32 left = __ballot_sync(0xffffffffu, x != Number(0));
#pragma unroll 1
        for (int n = 0; n < 4 && left; ++n) {
            const int first = __ffs(left) - 1;
            const i64 wanted = __shfl_sync(0xffffffffu, own, first);
            const bool same = left >> lane & 1 && own == wanted;
            const Number sum = lane_sum<1, 32>(same ? x : Number(0));
            if (lane == first) Sums::add(args, own, sum);
            left &= ~__ballot_sync(0xffffffffu, same);
        }
        if (left >> lane & 1) Sums::add(args, own, x);
    }
    __device__ void end_tile(const Gradient&, const Rows&, i32, i32) {}
    __device__ void finish(const Gradient&, const Rows&, i32) {}

   private:
    const Args& args;
};
