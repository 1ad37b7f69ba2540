#pragma once
// Sums of an array's elements to each of which one thread adds, in one order.
#include "ptx/base.cuh"

struct OrderedSums {
    // To the sums of the elements of a thread's pairs of one row, `step` for each key from the first one's on, of `count` keys. No two
    // are one, so that all are read at once.
    template <int n>
    __device__ static void add_row(const Args& args, const Number (&x)[n], i64 first, i64 step, i32 count) {
        Number sums[n];
#pragma unroll
        for (int j = 0; j < n; ++j) sums[j] = Layout::offset(j) < count ? args.sums[first + Layout::offset(j) * step] : Number(0);
#pragma unroll
        for (int j = 0; j < n; ++j)
            if (Layout::offset(j) < count) args.sums[first + Layout::offset(j) * step] = sums[j] + x[j];
    }
    __device__ static Number total(const Args& args, i64 element) { return args.sums[element]; }
};
