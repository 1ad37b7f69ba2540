#pragma once
// The states of a work's splits are folded by the launch behind (fold_pieces.cu): nothing is counted, and nobody waits. A block says which
// work it begins and others go on with, and where its share is.
#include "tile/share.cuh"

struct NextLaunch {
    Left left;

    template <class Scheduler>
    __device__ NextLaunch(const Scheduler& scheduler) : left{0, 0, 0, 0, 0, 0, scheduler.here, scheduler.end} {}
    template <class Smem, class Line, class Run>
    __device__ void list(const Args&, Smem& smem, const Line&, const Run& run) {
        if (run.split == run.splits.begin)
            left = {run.batch, run.head, run.q_begin, smem.next.rows, run.split_end - run.split, run.splits.end - run.split, left.begin, left.end};
    }
    __device__ void end(const Args& args) const {
        if (threadIdx.x == 0) args.left[blockIdx.x] = left;
    }
    template <class Consumer>
    __device__ static void fold(Consumer&, float) {}
};
