#pragma once
// An array's elements of which each is one pair's alone: its gradient is written where it stays, and there is no sum.
#include "function/element.cuh"

struct WrittenOnce {
    // The elements of a thread's pairs of one row, `step` for each key from the first one's on, of `count` keys. Two that lie side by side
    // are written together.
    template <int n>
    __device__ static void add_row(const Args& args, const Number (&x)[n], i64 first, i64 step, i32 count) {
        auto* const to = args.sums + first;
        if (step == 1 && Layout::offset(1) == 1 && Layout::offset(n - 1) < count && function::is_two(to)) {
#pragma unroll
            for (int j = 0; j < n; j += 2) function::write_two(to + Layout::offset(j), x[j], x[j + 1]);
        } else {
#pragma unroll
            for (int j = 0; j < n; ++j)
                if (Layout::offset(j) < count) function::write(to + Layout::offset(j) * step, x[j]);
        }
    }
};
