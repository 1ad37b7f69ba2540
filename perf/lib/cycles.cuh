#pragma once
// A softmax and a store that write to cycles[8 * block + consumer] how many clocks of the multiprocessor a warpgroup took from its
// first logits to its last row.
#include "ptx/base.cuh"

__device__ inline u32 clock_now() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

template <class Base> struct TimedSoftmax : Base {
    u32 begin = 0;

    __device__ explicit TimedSoftmax(float scale_log2) : Base(scale_log2) {}

    template <class S, int n, class Logits, class Again>
    __device__ bool next(float (&s)[n], const S& score, bool full, Logits logits, Again again) {
        if (begin == 0) begin = clock_now() | 1;
        return Base::next(s, score, full, logits, again);
    }
};

template <class Base> struct TimedStore {
    template <int n, class S>
    __device__ static void store(const Args& args, const Rows& rows, i32 head, i32 row, const float (&o)[n], const S& softmax) {
        Base::store(args, rows, head, row, o, softmax);
        const u32 end = clock_now();
        if (threadIdx.x % 128 == 0) args.cycles[8 * blockIdx.x + threadIdx.x / 128 - 1] = i32(end - softmax.begin);
    }
};
