#pragma once
// A softmax that writes to cycles[8 * block + consumer] how many clocks of the multiprocessor a warpgroup took from its first logits
// to the end of its work, when its rows are stored.
#include "ptx/base.cuh"

__device__ inline u32 clock_now() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

template <class Base> struct TimedSoftmax : Base {
    const Args& args;
    u32 begin = 0;

    __device__ TimedSoftmax(const Args& args, const Rows& rows, const WorkTile& work, float scale_log2)
        : Base(args, rows, work, scale_log2), args(args) {}
    __device__ ~TimedSoftmax() {
        const u32 end = clock_now();
        if (threadIdx.x % 128 == 0) args.cycles[8 * blockIdx.x + threadIdx.x / 128 - 1] = i32(end - begin);
    }

    template <class S, int n, class Logits, class Again>
    __device__ bool next(float (&s)[n], const S& score, bool full, Logits logits, Again again) {
        if (begin == 0) begin = clock_now() | 1;
        return Base::next(s, score, full, logits, again);
    }
};
