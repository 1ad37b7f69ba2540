#pragma once
// The states of a work's splits are folded by the block that comes last, in the launch that leaves them.
#include "tile/pieces.cuh"

struct LastBlock {
    template <class Scheduler>
    __device__ LastBlock(const Scheduler&) {}
    // By the first warp: of a work that others have parts of, before these states are there; and when there are no more works.
    template <class Smem, class Line, class Run>
    __device__ static void list(const Args& args, Smem& smem, const Line& line, const Run& run) { list_pieces(args, smem, line, run); }
    __device__ static void end(const Args& args) { end_counting(args); }

    // By consumers that have left the states of such a work.
    template <class Consumer>
    __device__ static void fold(Consumer& consumer, float scale_log2) {
        consumer.arrive();
        if (consumer.smem.is_last) consumer.fold_pieces(scale_log2);
    }
};
