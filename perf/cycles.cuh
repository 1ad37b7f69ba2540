#pragma once
// A schedule and a store that write clocks of the block's multiprocessor: cycles[8 * block] when its first work was taken, and
// cycles[8 * block + c] when consumer c had stored its rows.
#include "ptx/base.cuh"

__device__ inline void write_clock(const Args& args) {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    if (threadIdx.x % 128 == 0) args.cycles[8 * blockIdx.x + threadIdx.x / 128] = i32(now);
}

template <class Base> struct TimedSchedule : Base {
    __device__ explicit TimedSchedule(const Args& args) : Base(args) { write_clock(args); }
};

template <class Base> struct TimedStore {
    template <int n>
    __device__ static void store(const Args& args, const Rows& rows, i32 head, i32 row, const float (&o)[n], const Softmax& softmax) {
        Base::store(args, rows, head, row, o, softmax);
        write_clock(args);
    }
};
